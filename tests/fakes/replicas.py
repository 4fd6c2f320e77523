"""Several engines and one client of them, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import Collected, request, wait_until_async
from tests.fakes.fake_engine import FakeEngine

# Long enough for what is done to engines while streams are in the middle.
NUM_TOKENS = 240


class Reachable(Protocol):
    """An engine of a test."""

    @property
    def target(self) -> str: ...


@asynccontextmanager
async def connected(
    engines: Sequence[Reachable], **settings: Any
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


def state_of(client: RemoteEngineClient, engine: Reachable) -> str:
    return {each.name: each.state for each in client.statuses().engines}[engine.target]


def shares(client: RemoteEngineClient, engines: Sequence[Reachable]) -> list[int]:
    """Requests that each has now."""
    told = {engine.name: engine.num_requests for engine in client.statuses().engines}
    return [told[engine.target] for engine in engines]


def prompts(number: int, max_tokens: int = NUM_TOKENS) -> list[EngineRequest]:
    """Greedy and seeded ones, with different prompts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "n": 2},
    ]
    return [
        request(f"r{i}", (i + 1, i + 2, i + 3), max_tokens=max_tokens, **kinds[i % 2])
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


async def undisturbed(requests: Sequence[EngineRequest]) -> list[dict[int, list[int]]]:
    """What they give in an engine of their own, whose steps take no time."""
    with FakeEngine() as quiet:
        async with connected([quiet]) as client:
            return await Load(client, requests).tokens()
