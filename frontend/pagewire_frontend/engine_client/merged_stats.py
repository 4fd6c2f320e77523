"""What several engines count, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.v1 import engine_pb2

# Of one engine or of one step; everything else that is a number adds up.
_NOT_ADDED = frozenset({"epoch", "step_time_s", "tls_certificate_expires_at"})


def merged_stats(told: Sequence[engine_pb2.GetStatsResponse]) -> engine_pb2.GetStatsResponse:
    """Counts added up, the blocks of one engine after those of another.

    Args:
        told: at least one.
    """
    merged = engine_pb2.GetStatsResponse()
    merged.CopyFrom(told[0])
    for stats in told[1:]:
        for field in stats.DESCRIPTOR.fields:
            if field.message_type is None and field.name not in _NOT_ADDED:
                total = getattr(merged, field.name) + getattr(stats, field.name)
                setattr(merged, field.name, total)
        merged.step_time_s = max(merged.step_time_s, stats.step_time_s)
        _add_histogram(merged.iteration_tokens, stats.iteration_tokens)
        _add_histogram(merged.step_time, stats.step_time)
        if stats.HasField("delta_wire"):
            _add_counters(merged.delta_wire, stats.delta_wire)
        if stats.HasField("adapters"):
            _add_adapters(merged.adapters, stats.adapters)
        if stats.HasField("window"):
            _add_window(merged.window, stats.window)
    return merged


def _add_histogram(merged: engine_pb2.Histogram, more: engine_pb2.Histogram) -> None:
    if not merged.counts:
        merged.CopyFrom(more)
    elif list(merged.bounds) == list(more.bounds):
        counts = [one + other for one, other in zip(merged.counts, more.counts, strict=True)]
        del merged.counts[:]
        merged.counts.extend(counts)
        merged.sum += more.sum


def _add_counters(merged: engine_pb2.DeltaWireStats, more: engine_pb2.DeltaWireStats) -> None:
    for field in more.DESCRIPTOR.fields:
        setattr(merged, field.name, getattr(merged, field.name) + getattr(more, field.name))


def _add_adapters(merged: engine_pb2.AdapterStats, more: engine_pb2.AdapterStats) -> None:
    # Each is in every engine.
    merged.num_loaded = max(merged.num_loaded, more.num_loaded)
    for name in (
        "num_on_host",
        "num_on_device",
        "num_host_loads",
        "num_device_loads",
        "num_host_evictions",
    ):
        setattr(merged, name, getattr(merged, name) + getattr(more, name))
    for names, others in ((merged.running, more.running), (merged.waiting, more.waiting)):
        both = sorted({*names, *others})
        del names[:]
        names.extend(both)


def _add_window(merged: engine_pb2.EngineWindow, more: engine_pb2.EngineWindow) -> None:
    num_blocks, num_cpu_blocks = len(merged.blocks), len(merged.cpu_blocks)
    num_requests = len(merged.requests)
    merged.blocks += more.blocks
    merged.cpu_blocks += more.cpu_blocks
    for view in more.requests:
        added = merged.requests.add()
        added.CopyFrom(view)
        del added.blocks[:], added.cpu_blocks[:]
        added.blocks.extend(block + num_blocks for block in view.blocks)
        added.cpu_blocks.extend(block + num_cpu_blocks for block in view.cpu_blocks)
    _add_step(merged.step, more.step, num_requests)


def _add_step(
    merged: engine_pb2.StepComposition, more: engine_pb2.StepComposition, num_requests: int
) -> None:
    """Decodes stay before prefills."""
    requests, tokens = list(merged.request), list(merged.num_tokens)
    added = [request + num_requests for request in more.request]
    here, there = merged.num_decodes, more.num_decodes
    del merged.request[:], merged.num_tokens[:]
    merged.request.extend(requests[:here] + added[:there] + requests[here:] + added[there:])
    merged.num_tokens.extend(
        [
            *tokens[:here],
            *more.num_tokens[:there],
            *tokens[here:],
            *more.num_tokens[there:],
        ]
    )
    merged.num_decodes = here + there
    merged.step = max(merged.step, more.step)
