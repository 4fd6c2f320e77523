"""What the engines count, for Prometheus. They are asked when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagewire.delta_frames import Dropped
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import EngineStatuses


class EngineFigures(Collector):
    """A collector over the last answer of each engine. Without one an engine has no figures: a gap
    in a graph says more than a line of old values.

    Attributes:
        stats: the last answers, by the engine's name; none of those that are away.
        several: whether figures get the label `engine`.
    """

    def __init__(self) -> None:
        self.stats: Mapping[str, engine_pb2.GetStatsResponse] = {}
        self.several = False

    def describe(self) -> list[Metric]:
        """Nothing: the names need not be known beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a figure."""
        families: dict[str, Metric] = {}
        for engine, stats in self.stats.items():
            label = {"engine": engine} if self.several else {}
            for metric in _figures(stats):
                samples = [
                    sample._replace(labels={**label, **sample.labels}) for sample in metric.samples
                ]
                metric.samples = []
                families.setdefault(metric.name, metric).samples += samples
        yield from families.values()


class RoutingFigures(Collector):
    """How a frontend sees its engines, and what it sent where.

    Attributes:
        statuses: as of now.
    """

    def __init__(self) -> None:
        self.statuses = EngineStatuses()

    def describe(self) -> list[Metric]:
        """Nothing: the names need not be known beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a figure; none where the engine is in this process."""
        engines = self.statuses.engines
        if not engines:
            return
        up = GaugeMetricFamily(
            "pagewire_engine_up", "1 while the engine gets requests.", labels=["engine"]
        )
        state = GaugeMetricFamily(
            "pagewire_engine_state",
            "1 for the state that the engine is in: ready, away, stuck, draining, retired (its "
            "address is named no more), other_model or duplicate.",
            labels=["engine", "state"],
        )
        in_flight = GaugeMetricFamily(
            "pagewire_engine_requests_in_flight",
            "Requests of this frontend that the engine has.",
            labels=["engine"],
        )
        routed = CounterMetricFamily(
            "pagewire_engine_requests_routed",
            "Requests that were submitted to the engine; again ones count again.",
            labels=["engine"],
        )
        moved = CounterMetricFamily(
            "pagewire_requests_resubmitted",
            "Requests that were submitted again, by the reason: death, drain (or a stop of the "
            "engine), session (lost with the engine alive) or trial.",
            labels=["reason"],
        )
        for engine in engines:
            up.add_metric([engine.name], engine.state == "ready")
            state.add_metric([engine.name, engine.state], 1)
            in_flight.add_metric([engine.name], engine.num_requests)
            routed.add_metric([engine.name], engine.num_routed)
        for reason in ("death", "drain", "session", "trial"):
            moved.add_metric([reason], self.statuses.moved.get(reason, 0))
        yield from (up, state, in_flight, routed, moved)


def _figures(stats: engine_pb2.GetStatsResponse) -> Iterator[Metric]:
    yield from _gauges(stats)
    yield from _counters(stats)
    if stats.HasField("delta_wire"):
        yield from _delta_wire_figures(stats.delta_wire)
    if stats.tls_certificate_expires_at:
        yield GaugeMetricFamily(
            "pagewire_engine_tls_certificate_expiry_timestamp_seconds",
            "When the certificate of the engine's control API ends, seconds of the Unix clock.",
            value=stats.tls_certificate_expires_at,
        )
    if stats.HasField("adapters"):
        yield from _adapter_figures(stats.adapters)
    for name, text, told in (
        (
            "iteration_tokens_total",
            "Tokens computed in a step of the engine.",
            stats.iteration_tokens,
        ),
        ("step_time_seconds", "Seconds that a step of the engine took.", stats.step_time),
    ):
        if told.counts:  # an older engine tells none
            yield histogram_family(f"pagewire_{name}", text, told.bounds, told.counts, told.sum)


def _gauges(stats: engine_pb2.GetStatsResponse) -> Iterator[Metric]:
    held = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    for name, text, value in (
        ("num_requests_running", "Requests that the engine computes.", stats.num_running),
        ("num_requests_waiting", "Requests that wait to be computed.", stats.num_waiting),
        ("num_requests_swapped", "Requests whose blocks are in host memory.", stats.num_swapped),
        (
            "kv_cache_usage_perc",
            "Share of the KV blocks that requests hold; 1 is all.",
            _share(held, stats.num_blocks),
        ),
        (
            "cpu_cache_usage_perc",
            "Share of the KV blocks in host memory that swapped requests hold; 1 is all.",
            _share(stats.num_cpu_blocks - stats.num_free_cpu_blocks, stats.num_cpu_blocks),
        ),
    ):
        yield GaugeMetricFamily(f"pagewire_{name}", text, value=value)
    blocks = GaugeMetricFamily("pagewire_kv_blocks", "KV blocks by state.", labels=["state"])
    blocks.add_metric(["free"], stats.num_free_blocks)
    blocks.add_metric(["held"], held)
    blocks.add_metric(["cached"], stats.num_cached_blocks)
    yield blocks


def _adapter_figures(adapters: engine_pb2.AdapterStats) -> Iterator[Metric]:
    places = GaugeMetricFamily(
        "pagewire_lora_adapters", "LoRA adapters by place.", labels=["place"]
    )
    places.add_metric(["loaded"], adapters.num_loaded)
    places.add_metric(["host"], adapters.num_on_host)
    places.add_metric(["device"], adapters.num_on_device)
    yield places
    requests = GaugeMetricFamily(
        "pagewire_lora_adapters_in_use",
        "LoRA adapters with running and with waiting requests.",
        labels=["state"],
    )
    requests.add_metric(["running"], len(adapters.running))
    requests.add_metric(["waiting"], len(adapters.waiting))
    yield requests
    for name, text, value in (
        ("lora_host_loads", "LoRA weights read from files.", adapters.num_host_loads),
        ("lora_device_loads", "LoRA weights given a place in a step.", adapters.num_device_loads),
        (
            "lora_host_evictions",
            "LoRA weights that left host memory for others.",
            adapters.num_host_evictions,
        ),
    ):
        yield CounterMetricFamily(f"pagewire_{name}", text, value=value)


def _counters(stats: engine_pb2.GetStatsResponse) -> Iterator[Metric]:
    for name, text, value in (
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        (
            "prefix_cache_hits",
            "Prompt tokens that the prefix cache held.",
            stats.prefix_cache_hits,
        ),
        ("num_preemptions", "Requests that lost their blocks to others.", stats.num_preemptions),
        ("num_swaps", "Of those, requests whose blocks went to host memory.", stats.num_swaps),
        ("engine_steps", "Steps of the engine.", stats.step),
        (
            "engine_steps_overlapped",
            "Steps launched while the one before was computed.",
            stats.num_overlapped_steps,
        ),
        (
            "engine_steps_out_of_memory",
            "Steps for which the device had no memory, so that they were tried in parts.",
            stats.num_steps_out_of_memory,
        ),
        ("engine_requests_finished", "Requests that ended.", stats.num_requests_finished),
        ("engine_requests_failed", "Requests that failed.", stats.num_requests_failed),
    ):
        yield CounterMetricFamily(f"pagewire_{name}", text, value=value)


def _delta_wire_figures(wire: engine_pb2.DeltaWireStats) -> Iterator[Metric]:
    dropped = CounterMetricFamily(
        "pagewire_engine_wire_frames_dropped",
        "Frames that the engine dropped on the delta wire, by why.",
        labels=["reason"],
    )
    for reason, count in (
        (Dropped.DAMAGED, wire.num_damaged),
        (Dropped.OTHER_SESSION, wire.num_other_session),
        (Dropped.OLD_EPOCH, wire.num_old_epoch),
        (Dropped.UNSENT, wire.num_unsent),
        (Dropped.REFUSED, wire.num_refused),
    ):
        dropped.add_metric([reason.value], count)
    yield dropped
    yield CounterMetricFamily(
        "pagewire_engine_wire_rewinds",
        "How often frames that were not acknowledged were sent again.",
        value=wire.num_rewinds,
    )


def histogram_family(
    name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """A histogram that was counted elsewhere. `counts` is by bucket; Prometheus's add up."""
    cumulative = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
