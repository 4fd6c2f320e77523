"""What an engine tells and refuses over its control API, streams apart."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pagewire.v1 import engine_pb2, engine_pb2_grpc
from pagewire_engine.servicer import MAX_STATS_STREAMS
from tests.e2e.wire_peer import WirePeer, wait_until
from tests.fakes.fake_engine import VOCAB_SIZE, FakeEngine, fake_config


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(step_time_s=0.002) as running:
        yield running


@pytest.fixture
def peer(engine: FakeEngine) -> Iterator[WirePeer]:
    with WirePeer(engine.target) as speaking:
        yield speaking


def test_model_tokenizer_and_statistics_are_told() -> None:
    files = {"tokenizer.json": b"x" * 200_000, "empty.txt": b"", "chat_template.jinja": b"{{ }}"}
    with (
        FakeEngine(fake_config(served_model_name="named"), tokenizer_files=files) as engine,
        WirePeer(engine.target) as peer,
    ):
        info = peer.stub.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=30)
        assert (info.served_model_name, info.vocab_size) == ("named", VOCAB_SIZE)
        assert len(info.tokenizer_sha256) == 64
        chunks = list(peer.stub.GetTokenizer(engine_pb2.GetTokenizerRequest(), timeout=30))
        assert max(len(chunk.data) for chunk in chunks) <= 64 * 1024
        received: dict[str, bytes] = {}
        for chunk in chunks:
            received[chunk.path] = received.get(chunk.path, b"") + chunk.data
        assert received == files
        watching = peer.stub.GetStats(engine_pb2.GetStatsRequest(interval_ms=20), timeout=30)
        first, second = next(watching), next(watching)
        assert first.epoch == second.epoch == info.epoch
        assert first.num_free_blocks == first.num_blocks == info.num_blocks
        watching.cancel()


def test_a_reset_forgets_what_blocks_hold() -> None:
    with FakeEngine() as engine, WirePeer(engine.target) as peer:

        def run(number: int) -> None:
            peer.submit(f"r{number}", number, prompt=range(40), max_tokens=1)
            wait_until(lambda: peer.stats().num_requests_finished == number, "it has ended")

        peer.greet()
        run(1)
        run(2)
        # Of 40 tokens, 32 are in full blocks.
        assert peer.stats().prefix_cache_hits == 32
        reset = peer.stub.ResetPrefixCache(engine_pb2.ResetPrefixCacheRequest(), timeout=30)
        assert reset.num_blocks == 2
        assert peer.stats().num_cached_blocks == 0
        run(3)
        assert peer.stats().prefix_cache_hits == 32


def test_looks_at_the_window_take_a_watchers_place() -> None:
    with FakeEngine() as engine, WirePeer(engine.target) as peer:
        asked = engine_pb2.GetStatsRequest(interval_ms=60_000)
        watchers = [peer.stub.GetStats(asked, timeout=120) for _ in range(MAX_STATS_STREAMS)]
        for watching in watchers:
            next(watching)
        look = engine_pb2.GetStatsRequest(with_window=True)
        with pytest.raises(grpc.RpcError) as caught:
            next(peer.stub.GetStats(look, timeout=30))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MAX_STATS_STREAMS} others watch" in caught.value.details()
        # Who asks for the counters alone is answered at once.
        assert next(peer.stub.GetStats(engine_pb2.GetStatsRequest(), timeout=30)).epoch


def test_looks_leave_their_places_again(engine: FakeEngine, peer: WirePeer) -> None:
    look = engine_pb2.GetStatsRequest(with_window=True)
    for _ in range(2 * MAX_STATS_STREAMS):
        assert len(list(peer.stub.GetStats(look, timeout=30))) == 1


def test_a_watcher_sees_who_holds_which_block(engine: FakeEngine, peer: WirePeer) -> None:
    peer.greet()
    peer.submit("watched", 1, max_tokens=4000)
    peer.submit("other", 2, max_tokens=4000)
    asked = engine_pb2.GetStatsRequest(interval_ms=1, with_window=True)
    watching = peer.stub.GetStats(asked, timeout=60)
    wanted = {"watched", "other"}
    for stats in watching:
        window = stats.window
        shown = {view.id.split("@")[0]: view for view in window.requests}
        if wanted <= shown.keys() and all(len(shown[name].blocks) > 2 for name in wanted):
            break
    watching.cancel()
    peer.abort("watched")
    peer.abort("other")
    assert len(window.blocks) == stats.num_blocks
    held = {block for view in window.requests for block in view.blocks}
    # Held by one or by several; a cached block is nobody's.
    assert held == {block for block, state in enumerate(window.blocks) if state in (1, 2)}
    view = shown["watched"]
    assert view.state == engine_pb2.EngineRequestView.STATE_RUNNING
    assert view.num_prompt_tokens == 3
    assert view.num_computed_tokens == 3 + view.num_output_tokens - 1
    assert (list(window.step.num_tokens), window.step.num_decodes) == ([1, 1], 2)
    computed = {window.requests[index].id.split("@")[0] for index in window.step.request}
    assert computed == wanted


def test_adapters_are_refused_by_name(peer: WirePeer) -> None:
    for call, message in (
        (peer.stub.LoadAdapter, engine_pb2.LoadAdapterRequest(name="a", path="b")),
        (peer.stub.UnloadAdapter, engine_pb2.UnloadAdapterRequest(name="a")),
        (peer.stub.ListAdapters, engine_pb2.ListAdaptersRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=30)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "adapters are not enabled" in caught.value.details()


def test_health_and_reflection_answer(peer: WirePeer) -> None:
    health = health_pb2_grpc.HealthStub(peer.channel)
    for name in ("", "pagewire.v1.Engine"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(peer.channel).get_services()
    assert {"pagewire.v1.Engine", "grpc.health.v1.Health"} <= set(services)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_both_loopbacks_answer(engine: FakeEngine, host: str) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no ::1")
    with grpc.insecure_channel(f"{host}:{engine.port}") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        assert stub.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=30).vocab_size


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
