"""Several engines behind one frontend: some die, some leave, and no request notices."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagewire.errors import InternalError
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import Collected, WirePeer, collect, request, wait_until_async
from tests.fakes.fake_engine import FakeEngineProcess

STEP_TIME_S = 0.01
NUM_STREAMS = 16
NUM_TOKENS = 120
NUM_PROMPTS = 12


@pytest.fixture
def engines() -> Iterator[list[FakeEngineProcess]]:
    with (
        FakeEngineProcess(step_time_s=STEP_TIME_S) as one,
        FakeEngineProcess(step_time_s=STEP_TIME_S) as other,
    ):
        yield [one, other]


@asynccontextmanager
async def connected(
    engines: Sequence[FakeEngineProcess], **settings: Any
) -> AsyncIterator[RemoteEngineClient]:
    """A client of all of them, once each takes requests."""
    targets = [engine.target for engine in engines]
    client = RemoteEngineClient(*targets, **{"failover_window_s": 60.0, **settings})
    await client.start()
    try:
        await wait_until_async(lambda: states(client) == {"ready"}, "all engines are there")
        yield client
    finally:
        await client.close()


def states(client: RemoteEngineClient) -> set[str]:
    return {engine.state for engine in client.statuses().engines}


def state_of(client: RemoteEngineClient, engine: FakeEngineProcess) -> str:
    return {each.name: each.state for each in client.statuses().engines}[engine.target]


def shares(client: RemoteEngineClient, engines: Sequence[FakeEngineProcess]) -> list[int]:
    """Requests that each has now."""
    told = {engine.name: engine.num_requests for engine in client.statuses().engines}
    return [told[engine.target] for engine in engines]


def prompts(number: int) -> list[EngineRequest]:
    """Greedy and seeded ones, with different prompts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "n": 2},
    ]
    return [
        request(f"r{i}", (i + 1, i + 2, i + 3), max_tokens=NUM_TOKENS, **kinds[i % 2])
        for i in range(number)
    ]


class Load:
    """Streams that are under way together.

    Attributes:
        results: awaited, what each gave in the end.
    """

    def __init__(self, client: RemoteEngineClient, requests: Sequence[EngineRequest]) -> None:
        self.collected = [Collected() for _ in requests]
        self.results = asyncio.gather(
            *(
                self._read(client, each, collected)
                for each, collected in zip(requests, self.collected, strict=True)
            )
        )

    async def _read(
        self, client: RemoteEngineClient, one: EngineRequest, collected: Collected
    ) -> None:
        async for deltas in await client.submit(one):
            collected.add(deltas)

    async def in_the_middle(self) -> None:
        """Until each stream has a part of its tokens."""
        await wait_until_async(
            lambda: all(
                len(each.token_ids.get(0, ())) > NUM_TOKENS // 6 for each in self.collected
            ),
            "each stream has begun",
        )
        assert not self.results.done()

    async def tokens(self) -> list[dict[int, list[int]]]:
        await asyncio.wait_for(self.results, 120)
        return [each.token_ids for each in self.collected]


async def undisturbed(
    engine: FakeEngineProcess, requests: Sequence[EngineRequest]
) -> list[dict[int, list[int]]]:
    async with connected([engine]) as client:
        return await Load(client, requests).tokens()


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
    assert got == await undisturbed(engines[1], prompts(NUM_STREAMS))


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
    assert got == await undisturbed(engines[1], prompts(NUM_STREAMS))


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
            assert min(shares(client, engines)) > 0
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
    expected = await undisturbed(engines[0], [numbered(number) for number in range(NUM_PROMPTS)])
    assert len(answers) > 30
    for number, tokens in answers.items():
        assert tokens == expected[number % NUM_PROMPTS][0], number


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
        assert got == await undisturbed(one, prompts(6))


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


async def test_one_engine_by_two_names_is_one_engine(
    engines: list[FakeEngineProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = engines[0].port
    client = RemoteEngineClient(f"127.0.0.1:{port}", f"localhost:{port}")
    await client.start()
    try:
        await wait_until_async(
            lambda: (
                sorted(engine.state for engine in client.statuses().engines)
                == ["duplicate", "ready"]
            ),
            "one of them is left alone",
        )
        assert "are the same engine" in caplog.text
        got = await collect(await client.submit(request(max_tokens=5)))
        assert len(got.token_ids[0]) == 5
    finally:
        await client.close()
