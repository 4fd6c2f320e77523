"""Whatever happens to engines and on the ways to them, in whatever order: each request ends once,
with all its tokens, and one that kills engines fails alone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.errors import InternalError, PagewireError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client import link as link_module
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.failover import Failover
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet
from pagewire_frontend.engine_client.link import EngineLink
from tests.fakes.shaky_fleet import Control, FakeWire, ShakyFleet
from tests.fakes.stepped_engine import Deadly, token

WINDOW_S = 600.0
MAX_TOKENS = 24
DEADLY_PROMPT = (666,)
NUM_REQUESTS = 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass
class Seen:
    """What a client has seen of its request."""

    request: EngineRequest
    leaves_after: float
    stops_after: float
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    error: PagewireError | None = None
    left: bool = False

    async def read(self, failover: Failover) -> None:
        try:
            live = await failover.submit(self.request)
            while deltas := await live.mailbox.take():
                for delta in deltas:
                    index = delta.sequence_index
                    had = self.token_ids.setdefault(index, [])
                    assert index not in self.ends, "something came after the end"
                    assert delta.start == len(had), "tokens are lost, or repeated"
                    had += delta.token_ids
                    if delta.finish_reason is not None:
                        self.ends[index] = delta.finish_reason
                if len(self.token_ids[0]) > self.leaves_after:
                    self.left = True
                    failover.abandon(live)
                    return
                if len(self.token_ids[0]) > self.stops_after and 0 not in self.ends:
                    self.ends[0] = FinishReason.STOP
                    failover.finish_sequence(live, 0)
        except PagewireError as error:
            self.error = error

    def assert_whole(self, fleet: ShakyFleet) -> None:
        if self.error is not None:
            raise self.error
        if self.left:
            return
        params, prompt = self.request.sampling_params, tuple(self.request.prompt_token_ids)
        for index in range(params.n):
            if self.ends[index] is FinishReason.LENGTH:
                assert len(self.token_ids[index]) == MAX_TOKENS
            else:
                assert self.ends[index] is FinishReason.STOP
                assert index == 0
                assert len(self.token_ids[index]) > self.stops_after
        # All from one seed, whichever life of an engine has drawn it.
        assert any(
            all(
                had == [token(prompt, seed, index, i) for i in range(len(had))]
                for index, had in self.token_ids.items()
            )
            for seed in fleet.seeds[self.request.request_id]
        )


class Run:
    """One run of some requests in a shaky fleet."""

    def __init__(self, fleet: ShakyFleet, seen: list[Seen]) -> None:
        self.fleet = fleet
        self.seen = seen

    async def main(self) -> None:
        fleet = Fleet(WINDOW_S)
        self.failover = Failover(fleet, WINDOW_S, _prepare, FailoverCounts())
        engines = {engine.name: engine for engine in self.fleet.engines}

        def link_to(name: str) -> EngineLink:
            return EngineLink(name, lambda: Control(engines[name]), self.failover)  # type: ignore[arg-type]

        def wire(attached: object, *rest: object) -> FakeWire:
            session = FakeWire(attached, *rest)  # type: ignore[arg-type]
            session.engine = engines[attached.stream_endpoint]  # type: ignore[attr-defined]
            return session

        with patch.object(link_module, "WireSession", wire):
            for link in fleet.set_names(list(engines), link_to):
                link.start()
            reading = []
            for each in self.seen:
                await asyncio.sleep(self.fleet.dice.choice([0.0, 0.0, 0.1, 1.0]))
                reading.append(asyncio.create_task(each.read(self.failover)))
            try:
                await asyncio.gather(*reading)
                await self._rest(fleet)
            finally:
                await self.failover.close()
                for link in fleet.links.values():
                    await link.close()

    async def _rest(self, fleet: Fleet) -> None:
        """Nothing is left anywhere."""
        assert not self.failover._lives
        suspects = self.failover._suspects
        assert suspects.cleared
        assert not suspects._implicated
        for link in fleet.links.values():
            assert not link.lives
            assert link.own_load == 0
        # Aborts are on their way, or engines that lived while nobody looked come to know.
        for _ in range(200):
            if not any(engine.life and engine.life.running for engine in self.fleet.engines):
                return
            await asyncio.sleep(1.0)
        raise AssertionError("an engine runs what nobody wants")

    def run(self) -> Run:
        self.fleet.time.run(self.main, self.fleet.next_event)
        return self


async def _prepare(link: EngineLink, info: ModelInfo) -> None: ...


def requests(fleet: ShakyFleet, number: int = NUM_REQUESTS) -> list[Seen]:
    dice, found = fleet.dice, []
    for i in range(number):
        params = SamplingParams(
            n=dice.choice([1, 1, 2]),
            seed=dice.choice([None, 7]),
            max_tokens=MAX_TOKENS,
        )
        if dice.random() < 0.15:
            params = BeamSearchParams(beam_width=2, max_tokens=MAX_TOKENS).as_sampling_params()
        request = EngineRequest(f"r{i}", [i, i + 1], params)
        leaves = dice.choice([float("inf")] * 4 + [3])
        stops = dice.choice([float("inf")] * 4 + [5])
        found.append(Seen(request, leaves, stops))
    return found


HARMLESS = ["drain", "lose_a_call"]
# Where there are replicas, an engine that is away for a moment is taken to have died; at the third
# time somebody would be to blame.
AWAY = ["kill", "hang", "cut", "bury", "stop"]


def faults(fleet: ShakyFleet) -> list[str]:
    dice = fleet.dice
    others = HARMLESS if len(fleet.engines) > 1 else [*HARMLESS, "cut", "bury"]
    found = [dice.choice(others) for _ in range(12)] + [dice.choice(AWAY) for _ in range(2)]
    dice.shuffle(found)
    return found


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "40"))))
def test_requests_have_their_tokens_whatever_happens(seed: int, engines: int) -> None:
    fleet = ShakyFleet(seed, engines, None)
    fleet.faults = faults(fleet)
    for each in Run(fleet, requests(fleet)).run().seen:
        each.assert_whole(fleet)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("length", [0, 15])
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "40"))))
def test_one_that_kills_engines_fails_alone(seed: int, length: int, engines: int) -> None:
    fleet = ShakyFleet(seed, engines, Deadly(DEADLY_PROMPT, length))
    seen = requests(fleet)
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=1)
    deadly = Seen(EngineRequest("deadly", list(DEADLY_PROMPT), params), 1e9, 1e9)
    seen.insert(fleet.dice.randint(0, NUM_REQUESTS), deadly)
    Run(fleet, seen).run()
    seen.remove(deadly)
    assert isinstance(deadly.error, InternalError)
    for each in seen:
        each.assert_whole(fleet)
    deaths = sum(engine.deaths for engine in fleet.engines)
    assert deaths == 3 if length == 0 else deaths in (3, 4, 5), deaths
