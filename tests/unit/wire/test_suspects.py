"""Requests suspected of having killed an engine hold the others up no longer than they live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import MagicMock

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.errors import UnavailableError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client import suspects as suspects_module
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.failover import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.suspects import SUSPICIOUS_DEATHS, Suspects


@pytest.fixture
async def link() -> AsyncIterator[EngineLink]:
    link = EngineLink("127.0.0.1:1", 1.0)
    yield link
    await link.close()


def suspect(link: EngineLink) -> LiveRequest:
    live = LiveRequest(EngineRequest("r", [1], SamplingParams()), link._forget)
    link._lives[live] = None
    live.placed, live.deaths = True, SUSPICIOUS_DEATHS - 1
    link._suspects.count_death(live, trial=None)
    assert not link._suspects.cleared
    return live


async def test_one_that_is_dropped_before_its_trial_has_begun(link: EngineLink) -> None:
    live = suspect(link)
    link._send_for(live)
    link.abandon(live)
    await asyncio.sleep(0)
    assert link._suspects.cleared


async def test_one_that_fails_without_a_trial(link: EngineLink) -> None:
    suspect(link).mailbox.fail(UnavailableError("the engine came back with another model"))
    assert link._suspects.cleared


def placed() -> LiveRequest:
    live = LiveRequest(EngineRequest("r", [1], SamplingParams()), lambda live: None)
    live.placed = True
    return live


async def never(live: LiveRequest) -> None:
    await asyncio.Event().wait()


async def test_nobody_waits_for_trials_beyond_the_failover_window() -> None:
    suspects = Suspects(never, 0.2)
    first, second, other = placed(), placed(), placed()
    for live in (first, second):
        live.deaths = SUSPICIOUS_DEATHS - 1
        suspects.count_death(live, None)
    trial = asyncio.create_task(suspects.try_alone(first))
    await asyncio.sleep(0)
    started = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError, match="tried one by one"):
        await suspects.wait_for_verdicts(other)
    with pytest.raises(UnavailableError, match="tried one by one"):
        await suspects.try_alone(second)
    assert asyncio.get_running_loop().time() - started < 2
    trial.cancel()
    await asyncio.wait({trial})
    # The court is free again, and a verdict lets the others go on.
    suspects.acquit(first)
    suspects.acquit(second)
    await suspects.wait_for_verdicts(placed())


async def test_a_suspect_is_acquitted_once_it_has_come_past_the_point_of_death() -> None:
    proven = placed()
    proven.deaths = SUSPICIOUS_DEATHS - 1

    async def place(live: LiveRequest) -> None:
        live.mailbox.mute_all(FinishReason.ABORT)

    suspects = Suspects(place, 1.0)
    suspects.count_death(proven, None)
    assert proven in suspects
    await suspects.try_alone(proven)
    assert proven.deaths == 0


async def test_a_suspect_that_tells_nothing_before_its_end_holds_the_others_up_more_shortly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects_module, "_WHOLE_TRIAL_TIMEOUT_S", 0.1)
    params = BeamSearchParams(beam_width=2).as_sampling_params()
    beams = LiveRequest(EngineRequest("r", [1], params), lambda live: None)
    sampled = placed()
    beams.deaths = sampled.deaths = SUSPICIOUS_DEATHS

    async def place(live: LiveRequest) -> None:
        live.session = MagicMock()

    await asyncio.wait_for(Suspects(place, 1.0).try_alone(beams), 5)
    assert beams.deaths == 0
    assert not beams.mailbox.ended
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Suspects(place, 1.0).try_alone(sampled), 0.5)


async def test_one_that_kills_the_engine_on_trial_has_failed_and_the_others_are_not_blamed() -> (
    None
):
    suspects = Suspects(never, 1.0)
    guilty, bystander = placed(), placed()
    guilty.deaths = SUSPICIOUS_DEATHS - 1
    suspects.count_death(guilty, trial=guilty)
    suspects.count_death(bystander, trial=guilty)
    assert guilty.mailbox.ended
    assert bystander.deaths == 0
    assert suspects.cleared
