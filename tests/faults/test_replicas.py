"""Several engines behind one frontend: some die, some leave, and no request notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from pagewire.errors import InternalError
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import WirePeer, collect, request, wait_until_async
from tests.fakes.fake_engine import ROOT, FakeEngineProcess
from tests.fakes.replicas import (
    NUM_TOKENS,
    Load,
    connected,
    prompts,
    shares,
    state_of,
    states,
    undisturbed,
)

STEP_TIME_S = 0.02
NUM_STREAMS = 16
NUM_PROMPTS = 12


@pytest.fixture
def engines() -> Iterator[list[FakeEngineProcess]]:
    with (
        FakeEngineProcess(step_time_s=STEP_TIME_S) as one,
        FakeEngineProcess(step_time_s=STEP_TIME_S) as other,
    ):
        yield [one, other]


async def test_streams_of_a_killed_engine_go_on_in_the_other_at_once(
    engines: list[FakeEngineProcess],
) -> None:
    async with connected(engines) as client:
        load = Load(client, prompts(NUM_STREAMS))
        await load.in_the_middle()
        before = shares(client, engines)
        assert min(before) >= NUM_STREAMS // 4, "different prompts are spread"
        engines[0].kill()
        # It stays dead: those that it had have no other place to go on.
        got = await load.tokens()
        assert state_of(client, engines[0]) == "away"
        assert client.ready
        assert client.statuses().moved["death"] == before[0]
        # Back again, it gets requests again.
        await asyncio.to_thread(engines[0].start)
        await wait_until_async(lambda: states(client) == {"ready"}, "it is back")
        again = Load(client, [request(f"again{i}", (9, i)) for i in range(8)])
        await wait_until_async(lambda: min(shares(client, engines)) > 0, "both get requests")
        await again.tokens()
    assert got == await undisturbed(prompts(NUM_STREAMS))


async def test_streams_of_a_draining_engine_go_to_the_other(
    engines: list[FakeEngineProcess],
) -> None:
    async with connected(engines) as client:
        load = Load(client, prompts(NUM_STREAMS))
        await load.in_the_middle()
        with WirePeer(engines[0].target) as operator:
            drain = engine_pb2.DrainRequest(timeout_s=60)
            drained = await asyncio.to_thread(operator.stub.Drain, drain, timeout=90)
            assert drained.unfinished == 0
            assert not load.results.done(), "they were moved, not waited for"
            assert shares(client, engines)[0] == 0
            assert state_of(client, engines[0]) == "draining"
            assert operator.num_held_blocks() == 0
        got = await load.tokens()
        assert client.statuses().moved["drain"] > 0
    assert got == await undisturbed(prompts(NUM_STREAMS))


@pytest.mark.slow
async def test_a_rolling_restart_under_load_fails_no_request(
    engines: list[FakeEngineProcess],
) -> None:
    numbers = itertools.count()
    stop = asyncio.Event()
    answers: dict[int, list[int]] = {}

    def numbered(number: int) -> EngineRequest:
        return request(f"n{number}", (number % NUM_PROMPTS + 1, 7), max_tokens=60)

    async with connected(engines) as client:

        async def ask() -> None:
            while not stop.is_set():
                number = next(numbers)
                got = await collect(await client.submit(numbered(number)))
                answers[number] = got.token_ids[0]

        asking = [asyncio.create_task(ask()) for _ in range(12)]
        await wait_until_async(lambda: len(answers) > 12, "the load has begun")
        for engine in engines:
            await wait_until_async(lambda: min(shares(client, engines)) > 0, "both have some")
            engine.signal(signal.SIGTERM)
            await asyncio.to_thread(engine.wait, 60)
            assert client.ready
            answered = len(answers)
            await wait_until_async(
                lambda answered=answered: len(answers) > answered + 6, "the other answers"
            )
            await asyncio.to_thread(engine.start)
            await wait_until_async(lambda: states(client) == {"ready"}, "it is back")
            await wait_until_async(lambda: min(shares(client, engines)) > 0, "it gets requests")
        stop.set()
        await asyncio.wait_for(asyncio.gather(*asking), 60)
        assert client.statuses().moved["drain"] > 0
    expected = await undisturbed([numbered(number) for number in range(NUM_PROMPTS)])
    assert len(answers) > 30
    for number, tokens in answers.items():
        assert tokens == expected[number % NUM_PROMPTS][0], number


@pytest.mark.slow
async def test_a_poison_request_kills_no_engine_a_fourth_time() -> None:
    poison = 666
    knobs = {"step_time_s": STEP_TIME_S, "poison": poison}
    with FakeEngineProcess(**knobs) as one, FakeEngineProcess(**knobs) as other:
        async with connected([one, other], failover_window_s=240.0) as client:
            healthy = Load(client, prompts(6))
            await healthy.in_the_middle()
            deadly = asyncio.create_task(
                collect(await client.submit(request("dead", (1, poison, 2))))
            )
            deaths = 0
            while not deadly.done():
                await asyncio.sleep(0.02)
                for engine in (one, other):
                    if not engine.alive:
                        deaths += 1
                        await asyncio.to_thread(engine.start)
            with pytest.raises(InternalError, match="died of this request"):
                await deadly
            assert deaths <= 3
            got = await healthy.tokens()
        assert got == await undisturbed(prompts(6))


async def test_requests_that_begin_alike_go_to_one_engine_which_has_them_cached(
    engines: list[FakeEngineProcess],
) -> None:
    shared = tuple(range(1, 513))
    async with connected(engines) as client:
        first = request("first", (*shared, 900), max_tokens=2)
        await collect(await client.submit(first))
        cached = []
        for number in range(6):
            asked = request(f"a{number}", (*shared, 901 + number), max_tokens=2)
            got = await collect(await client.submit(asked))
            times = got.finished[0].times
            assert times is not None
            cached.append(times.cached_tokens)
        routed = sorted(engine.num_routed for engine in client.statuses().engines)
    assert cached == [512] * 6
    assert routed == [0, 7]


ENGINE_SERVICE = """
import sys
import pagewire_engine.build
from pagewire_engine.cli import main
from tests.fakes.fake_engine import build_fake_engine

pagewire_engine.build.build_engine = lambda config, report: build_fake_engine(
    config, report, step_time_s=0.01
)
sys.exit(main(["fake", f"--port={sys.argv[1]}", f"--drain-timeout-s={sys.argv[2]}"]))
"""


@pytest.mark.parametrize(
    "signals", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["in its time", "asked twice"]
)
async def test_a_lone_engine_lets_its_requests_end_before_it_stops(
    free_port: Callable[[], int], signals: int
) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENGINE_SERVICE, str(port), "120"), cwd=ROOT
    )
    client = RemoteEngineClient(f"127.0.0.1:{port}", failover_window_s=60.0)
    try:
        await client.start()
        num_tokens = 2 * NUM_TOKENS if signals == 1 else 4000
        load = Load(client, [request(f"r{i}", max_tokens=num_tokens) for i in range(4)])
        await load.in_the_middle()
        process.send_signal(signal.SIGTERM)
        await wait_until_async(lambda: not client.ready, "it takes nothing new")
        assert states(client) == {"draining"}
        if signals == 1:
            await load.tokens()
            assert client.statuses().moved == {}
        else:
            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert load.results.done() == (signals == 1)
        if signals == 2:
            load.results.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load.results
    finally:
        if process.returncode is None:
            process.kill()
        await client.close()
