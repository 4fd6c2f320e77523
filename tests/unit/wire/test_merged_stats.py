"""Several engines' figures as one engine's."""

from __future__ import annotations

from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.merged_stats import merged_stats
from pagewire_frontend.engine_client.replicated_adapters import merged_adapters

View, State = engine_pb2.EngineRequestView, engine_pb2.AdapterInfo.State


def stats(request: str, step: engine_pb2.StepComposition) -> engine_pb2.GetStatsResponse:
    return engine_pb2.GetStatsResponse(
        epoch=7,
        num_waiting=2,
        num_blocks=3,
        step_time_s=0.5,
        iteration_tokens=engine_pb2.Histogram(bounds=[1, 2], counts=[1, 0, 2], sum=9),
        delta_wire=engine_pb2.DeltaWireStats(num_damaged=1),
        adapters=engine_pb2.AdapterStats(num_loaded=1, num_host_loads=2, running=["a"]),
        window=engine_pb2.EngineWindow(
            blocks=b"\1\0\2",
            cpu_blocks=b"\1",
            requests=[
                View(id=f"{request}1", blocks=[0], cpu_blocks=[0]),
                View(id=f"{request}2", blocks=[2, 0]),
            ],
            step=step,
        ),
    )


def test_counts_add_up_and_blocks_follow_one_another() -> None:
    one = stats(
        "a", engine_pb2.StepComposition(step=5, request=[0, 1], num_tokens=[1, 30], num_decodes=1)
    )
    other = stats(
        "b", engine_pb2.StepComposition(step=9, request=[1, 0], num_tokens=[1, 1], num_decodes=2)
    )
    both = merged_stats([one, other])
    assert (both.epoch, both.num_waiting, both.num_blocks, both.step_time_s) == (7, 4, 6, 0.5)
    assert list(both.iteration_tokens.counts) == [2, 0, 4]
    assert both.iteration_tokens.sum == 18
    assert both.delta_wire.num_damaged == 2
    assert (both.adapters.num_loaded, both.adapters.num_host_loads) == (1, 4)
    assert list(both.adapters.running) == ["a"]
    window = both.window
    assert window.blocks == b"\1\0\2\1\0\2"
    assert [(view.id, list(view.blocks)) for view in window.requests] == [
        ("a1", [0]),
        ("a2", [2, 0]),
        ("b1", [3]),
        ("b2", [5, 3]),
    ]
    assert [list(view.cpu_blocks) for view in window.requests] == [[0], [], [1], []]
    # Decodes stay before prefills, and each entry keeps its request.
    step = window.step
    assert (step.step, step.num_decodes) == (9, 3)
    assert list(zip(step.request, step.num_tokens, strict=True)) == [
        (0, 1),
        (3, 1),
        (2, 1),
        (1, 30),
    ]


def test_of_one_engine_nothing_is_changed() -> None:
    one = stats("a", engine_pb2.StepComposition())
    assert merged_stats([one]) == one


def listed(revision: str, *adapters: engine_pb2.AdapterInfo) -> engine_pb2.ListAdaptersResponse:
    return engine_pb2.ListAdaptersResponse(adapters=adapters, revision=revision)


def adapter(name: str, state: State.ValueType, version: str = "1") -> engine_pb2.AdapterInfo:
    return engine_pb2.AdapterInfo(
        name=name, version=version, state=state, num_running_requests=1, host_bytes=10
    )


def test_an_adapter_in_two_engines_is_one_and_an_old_version_follows_its_heir() -> None:
    one = listed("x", adapter("a", State.STATE_HOST, "2"), adapter("a", State.STATE_LEAVING))
    other = listed("y", adapter("a", State.STATE_DEVICE, "2"), adapter("b", State.STATE_DISK))
    both = merged_adapters([one, other])
    assert [(each.name, each.version, each.state) for each in both.adapters] == [
        ("a", "2", State.STATE_DEVICE),
        ("a", "1", State.STATE_LEAVING),
        ("b", "1", State.STATE_DISK),
    ]
    assert (both.adapters[0].num_running_requests, both.adapters[0].host_bytes) == (2, 20)
    # Another revision as soon as one of the engines' is.
    assert both.revision != merged_adapters([one, listed("z", *other.adapters)]).revision
    assert both.revision == merged_adapters([one, other]).revision
