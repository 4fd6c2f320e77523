"""A delta wire that loses, repeats, reorders, damages and misroutes frames in both directions:
every stream is what it is on a good one, what was dropped is counted, and nobody keeps anything."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pagewire.beam_search_params import BeamSettings
from pagewire.delta_frames import Dropped, FrameCounts
from pagewire_engine import sessions
from pagewire_engine.sessions import WINDOW, Session
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.serving import Serving
from tests.e2e.wire_peer import Collected, WirePeer, collect, request, wait_until_async
from tests.fakes.fake_engine import FakeEngine, fake_config
from tests.faults.bad_wire import (
    AGE,
    CUT,
    FLIP,
    GARBAGE,
    HARM,
    MISROUTE,
    PROMISE,
    TO_ENGINE,
    TO_FRONTEND,
    BadBytes,
    BadFrames,
)

NUM_TOKENS = 120
BOTH = TO_ENGINE, TO_FRONTEND
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "n": 3},
    {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0},
    {"temperature": 0.0, "beam_search": BeamSettings(beam_width=3), "n": 2},
]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    # What is lost is sent again soon.
    monkeypatch.setattr(sessions, "ACK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sessions, "MAX_ACK_TIMEOUT_S", 0.8)
    with FakeEngine(fake_config(stream_endpoint="tcp://127.0.0.1:*"), step_time_s=0.002) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed() -> list[Collected]:
    async def run() -> list[Collected]:
        with FakeEngine() as engine:
            client = RemoteEngineClient(engine.target)
            await client.start()
            try:
                return await run_all(client)
            finally:
                await client.close()

    return asyncio.run(run())


async def run_all(client: RemoteEngineClient, rounds: int = 4) -> list[Collected]:
    async def one(number: int) -> Collected:
        params = {"max_tokens": NUM_TOKENS, **KINDS[number % len(KINDS)]}
        prompt = tuple(1 + (number + i) % 900 for i in range(20))
        return await collect(await client.submit(request(f"r{number}", prompt, **params)))

    return list(await asyncio.gather(*map(one, range(rounds * len(KINDS)))))


def assert_same(got: list[Collected], wanted: list[Collected]) -> None:
    for index, (mine, expected) in enumerate(zip(got, wanted, strict=True)):
        assert mine.token_ids == expected.token_ids, index
        assert mine.logprobs == expected.logprobs, index
        assert mine.prompt_logprobs == expected.prompt_logprobs, index
        ends = {number: delta.finish_reason for number, delta in mine.finished.items()}
        assert ends == {number: d.finish_reason for number, d in expected.finished.items()}


def session_of(client: RemoteEngineClient, engine: FakeEngine) -> Session:
    """The engine's end of a client's session. It may have others, whose Hello was lost."""
    session = engine.server._streams.sessions.by_id(wire_session(client).session_id)
    assert session is not None
    return session


def wire_session(client: RemoteEngineClient) -> WireSession:
    session = only_link(client).session
    assert session is not None
    return session


def only_link(client: RemoteEngineClient) -> EngineLink:
    assert client._pool is not None
    (link,) = client._pool.fleet.links.values()
    return link


async def watch_window(engine: FakeEngine) -> None:
    """The engine never has more on its way than it may keep."""
    while True:
        for session in list(engine.server._streams.sessions.all()):
            assert session.num_unacknowledged <= WINDOW
        await asyncio.sleep(0.01)


async def assert_nothing_is_kept(engine: FakeEngine, client: RemoteEngineClient) -> None:
    session = session_of(client, engine)
    await wait_until_async(lambda: not session.streams, "the engine has forgotten every stream")
    assert not session._owner
    assert not session._pending
    assert not session._unacknowledged
    assert not wire_session(client).streams
    assert not only_link(client).lives
    core = engine.built.engine
    await wait_until_async(lambda: not core.has_work, "the engine comes to rest")
    core.queues.blocks.check()
    assert core.queues.blocks.num_available_blocks == core.queues.blocks.num_blocks


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
)
async def test_streams_are_whole_whatever_becomes_of_frames(
    engine: FakeEngine, undisturbed: list[Collected], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    streams = engine.server._streams
    counts = FrameCounts()
    with BadFrames(streams.endpoint.advertised, random.Random(seed), rate=0.25) as wire:
        streams.endpoint.advertised = wire.endpoint
        client = RemoteEngineClient(engine.target, frames=counts)
        await client.start()
        watching = asyncio.create_task(watch_window(engine))
        # Until all of it was done, in both directions.
        while min(wire.done[where, what] for where in BOTH for what in HARM) < 2:
            assert_same(await asyncio.wait_for(run_all(client), 120), undisturbed)
            assert not watching.done(), watching.exception()
        watching.cancel()
        wire.harmful = False
        await assert_nothing_is_kept(engine, client)
        assert_counted(counts.dropped(), wire, TO_FRONTEND)
        assert_counted(streams.frames.dropped(), wire, TO_ENGINE)
        assert counts.dropped()[Dropped.REPEATED] > 0
        assert counts.dropped()[Dropped.OUT_OF_ORDER] > 0
        assert counts.num_rewinds > 0
        assert streams.frames.num_rewinds > 0
        await client.close()
    # Nor does a bad wire fill the log.
    assert len([r for r in caplog.records if "no frame" in r.getMessage()]) < 40


def assert_counted(dropped: Mapping[Dropped, int], wire: BadFrames, where: str) -> None:
    """Each frame that was spoiled was dropped for what had been done to it, unless the connection
    that it was on had ended by then."""
    done = wire.done
    for reason, kinds in {
        Dropped.DAMAGED: (FLIP, CUT, GARBAGE),
        Dropped.OTHER_SESSION: (MISROUTE,),
        Dropped.OLD_EPOCH: (AGE,),
        Dropped.UNSENT: (PROMISE,),
    }.items():
        spoiled = sum(done[where, kind] for kind in kinds)
        assert dropped[reason] <= spoiled + done[TO_ENGINE, MISROUTE], (reason, dropped, done)
        if spoiled > 3:
            assert dropped[reason] > 0, (reason, dropped, done)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
async def test_streams_are_whole_whatever_becomes_of_bytes(
    engine: FakeEngine, undisturbed: list[Collected], seed: int
) -> None:
    streams = engine.server._streams
    port = int(streams.endpoint.advertised.rpartition(":")[2])
    with BadBytes(port, random.Random(seed), rate=0.06) as wire:
        streams.endpoint.advertised = wire.endpoint
        client = RemoteEngineClient(engine.target)
        await client.start()
        while min(wire.done["flip"], wire.done["sever"]) < 2:
            assert_same(await asyncio.wait_for(run_all(client), 240), undisturbed)
        wire.harmful = False
        await assert_nothing_is_kept(engine, client)
        await client.close()


async def test_both_ends_tell_prometheus_what_they_dropped(engine: FakeEngine) -> None:
    serving = Serving(FrontendConfig())
    client = RemoteEngineClient(engine.target, frames=serving.metrics.frames)
    await client.start()
    serving.connect(await Generation.create(client, GenerationSettings()))
    with WirePeer(engine.target) as peer:
        peer.greet()
        peer.ack(77)
        assert peer.socket is not None
        peer.socket.send(b"noise")
        peer.hello(epoch=5)
        peer.hello(secret="guess")
        peer.next("goodbye")
    wire_session(client)._take(b"noise")
    text = (await serving.scrape()).decode()
    await client.close()
    for figure in (
        'engine_wire_frames_dropped_total{model_name="fake",reason="damaged"} 1.0',
        'engine_wire_frames_dropped_total{model_name="fake",reason="unsent"} 1.0',
        'engine_wire_frames_dropped_total{model_name="fake",reason="old_epoch"} 1.0',
        'engine_wire_frames_dropped_total{model_name="fake",reason="refused"} 1.0',
        'engine_wire_frames_dropped_total{model_name="fake",reason="other_session"} 0.0',
        'engine_wire_rewinds_total{model_name="fake"} 0.0',
        'wire_frames_dropped_total{model_name="fake",reason="damaged"} 1.0',
        'wire_frames_dropped_total{model_name="fake",reason="out_of_order"} 0.0',
        'wire_rewinds_total{model_name="fake"} 0.0',
    ):
        assert f"pagewire_{figure}" in text
