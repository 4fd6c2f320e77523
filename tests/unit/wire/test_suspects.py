"""Requests suspected of having killed an engine hold the others up no longer than they live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import MagicMock

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.errors import UnavailableError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client import suspects as suspects_module
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.failover import Failover
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet
from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.suspects import SUSPICIOUS_DEATHS, Suspects


async def unprepared(link: EngineLink, info: ModelInfo) -> None: ...


@pytest.fixture
async def failover() -> AsyncIterator[Failover]:
    failover = Failover(Fleet(1.0), 1.0, unprepared, FailoverCounts())
    yield failover
    await failover.close()


def suspect(failover: Failover) -> LiveRequest:
    live = LiveRequest(EngineRequest("r", [1], SamplingParams()), failover._forget)
    failover._lives[live] = None
    live.placed, live.deaths = True, SUSPICIOUS_DEATHS - 1
    failover._suspects.count_death(live, trial=None)
    assert not failover._suspects.cleared
    return live


async def test_one_that_is_dropped_before_its_trial_has_begun(failover: Failover) -> None:
    live = suspect(failover)
    failover._submission.again(live, "death")
    failover.abandon(live)
    await asyncio.sleep(0)
    assert failover._suspects.cleared


async def test_one_that_fails_without_a_trial(failover: Failover) -> None:
    suspect(failover).mailbox.fail(UnavailableError("the engine came back with another model"))
    assert failover._suspects.cleared


def placed() -> LiveRequest:
    live = LiveRequest(EngineRequest("r", [1], SamplingParams()), lambda live: None)
    live.placed = True
    return live


async def never(live: LiveRequest) -> None:
    await asyncio.Event().wait()


async def test_nobody_waits_for_trials_beyond_the_failover_window() -> None:
    suspects = Suspects(0.2)
    first, second, other = placed(), placed(), placed()
    for live in (first, second):
        live.deaths = SUSPICIOUS_DEATHS - 1
        suspects.count_death(live, None)
    trial = asyncio.create_task(suspects.try_alone(first, never))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        with pytest.raises(UnavailableError, match="tried one by one"):
            await suspects.wait_for_verdicts(other)
        with pytest.raises(UnavailableError, match="tried one by one"):
            await suspects.try_alone(second, never)
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
        live.session = live.accepted_in = MagicMock()
        asyncio.get_running_loop().call_soon(come_past)

    def come_past() -> None:
        proven.mailbox.add_tokens(0, 0, [1] * suspects_module._UNSEEN_TOKENS)
        proven.mailbox.wake()

    suspects = Suspects(1.0)
    suspects.count_death(proven, None)
    assert proven in suspects
    await suspects.try_alone(proven, place)
    assert proven not in suspects
    assert suspects.cleared
    # Nothing is explained: at the next death it is suspected again, and at once.
    suspects.count_death(proven, None)
    assert proven in suspects


async def test_a_suspect_that_tells_nothing_before_its_end_holds_the_others_up_more_shortly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects_module, "_WHOLE_TRIAL_TIMEOUT_S", 0.1)
    params = BeamSearchParams(beam_width=2).as_sampling_params()
    beams = LiveRequest(EngineRequest("r", [1], params), lambda live: None)
    sampled = placed()
    beams.placed = True

    async def place(live: LiveRequest) -> None:
        live.session = live.accepted_in = MagicMock()
        live.link = MagicMock(answering=True, usable=False)  # as a retired one

    suspects = Suspects(1.0)
    for _ in range(SUSPICIOUS_DEATHS):
        blamed(suspects, beams, sampled)
    await asyncio.wait_for(suspects.try_alone(beams, place), 5)
    assert beams not in suspects
    assert not beams.mailbox.ended
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(suspects.try_alone(sampled, place), 0.5)


async def test_one_that_kills_the_engine_on_trial_has_failed_and_the_others_are_not_blamed() -> (
    None
):
    suspects = Suspects(1.0)
    guilty, bystander = placed(), placed()
    guilty.deaths = SUSPICIOUS_DEATHS - 1
    suspects.count_death(guilty, trial=guilty)
    suspects.count_death(bystander, trial=guilty)
    assert guilty.mailbox.ended
    assert bystander.deaths == 0
    assert suspects.cleared


def blamed(suspects: Suspects, *lives: LiveRequest) -> None:
    """An engine died with all of these in flight."""
    for live in lives:
        suspects.count_death(live, trial=None)


async def test_one_that_came_past_the_point_of_death_is_not_to_blame_for_that_death() -> None:
    suspects = Suspects(1.0)
    busy, stuck = placed(), placed()
    count = suspects_module._UNSEEN_TOKENS + suspects_module._HARMLESS_TOKENS
    for tokens in ([1] * count, [2] * count, [3] * count):
        blamed(suspects, busy, stuck)
        busy.mailbox.add_tokens(0, busy.mailbox.num_tokens, tokens)
    assert busy not in suspects
    assert stuck in suspects
    assert busy.deaths == 1


async def test_each_sequence_must_have_come_past_it() -> None:
    suspects = Suspects(1.0)
    live = LiveRequest(EngineRequest("r", [1], SamplingParams(n=3)), lambda live: None)
    live.placed = True
    blamed(suspects, live)
    for index in range(3):
        live.mailbox.add_tokens(index, 0, [1] * 16)
    blamed(suspects, live)
    assert live in suspects


async def test_a_conviction_explains_the_deaths_and_clears_everybody_else() -> None:
    submitted: list[LiveRequest] = []
    on_trial = asyncio.Event()

    async def place(live: LiveRequest) -> None:
        submitted.append(live)
        on_trial.set()
        if live is guilty:
            await asyncio.Event().wait()

    suspects = Suspects(1.0)
    guilty, *others = lives = [placed() for _ in range(4)]
    for _ in range(SUSPICIOUS_DEATHS):
        blamed(suspects, *lives)
    trials = [asyncio.create_task(suspects.try_alone(live, place)) for live in lives]
    await on_trial.wait()
    assert submitted == [guilty]
    suspects.count_death(guilty, trial=guilty)
    assert guilty.mailbox.ended
    assert suspects.cleared
    trials[0].cancel()
    await asyncio.wait(trials)
    # Nobody else need be tried.
    assert submitted == [guilty]
    assert [live.deaths for live in others] == [0, 0, 0]


async def test_one_that_has_come_through_its_trial_is_cleared_by_another_s_conviction() -> None:
    async def place(live: LiveRequest) -> None:
        live.session = live.accepted_in = MagicMock()
        if live is proven:
            live.mailbox.add_tokens(0, 0, [1] * suspects_module._UNSEEN_TOKENS)
        else:
            suspects.count_death(live, trial=live)

    suspects = Suspects(1.0)
    proven, guilty = placed(), placed()
    for _ in range(SUSPICIOUS_DEATHS):
        blamed(suspects, proven, guilty)
    await suspects.try_alone(proven, place)
    assert proven.deaths == SUSPICIOUS_DEATHS - 1
    await suspects.try_alone(guilty, place)
    assert guilty.mailbox.ended
    assert proven.deaths == 0


async def test_a_conviction_explains_the_one_death_of_who_came_after_the_first() -> None:
    suspects = Suspects(1.0)
    guilty, newcomer = placed(), placed()
    blamed(suspects, guilty)
    blamed(suspects, guilty, newcomer)
    suspects.count_death(guilty, trial=guilty)
    assert newcomer.deaths == 0
    # At the next death it is there once, and not twice.
    blamed(suspects, newcomer)
    assert suspects.cleared


async def test_a_trial_s_time_stands_still_while_the_engine_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects_module, "_TRIAL_TIMEOUT_S", 0.02)
    live, link = placed(), MagicMock(answering=False)

    async def place(live: LiveRequest) -> None:
        live.session, live.link = MagicMock(), link
        live.accepted_in = live.session

    suspects = Suspects(1.0)
    for _ in range(SUSPICIOUS_DEATHS):
        blamed(suspects, live)
    trial = asyncio.create_task(suspects.try_alone(live, place))
    await asyncio.sleep(0.2)
    assert live in suspects
    link.answering = True
    await asyncio.wait_for(trial, 10)
    assert live not in suspects


async def test_a_trial_goes_further_where_the_engine_may_have_been_far_ahead() -> None:
    live = placed()

    async def place(live: LiveRequest) -> None:
        live.session = live.accepted_in = MagicMock()

    suspects = Suspects(1.0)
    for _ in range(SUSPICIOUS_DEATHS):
        suspects.count_death(live, None, lagged=True)
    trial = asyncio.create_task(suspects.try_alone(live, place))
    for start in range(0, 64, 8):
        await asyncio.sleep(0)
        assert live in suspects
        live.mailbox.add_tokens(0, start, [1] * 8)
        live.mailbox.wake()
    await asyncio.wait_for(trial, 10)
    assert live not in suspects


async def test_what_seemed_a_death_may_be_none() -> None:
    suspects = Suspects(1.0)
    live = placed()
    for _ in range(SUSPICIOUS_DEATHS):
        blamed(suspects, live)
    suspects.withdraw_death(live)
    assert suspects.cleared
    blamed(suspects, live)
    assert live in suspects


async def test_nobody_is_implicated_in_deaths_that_were_none() -> None:
    suspects = Suspects(1.0)
    live = placed()
    blamed(suspects, live)
    assert live in suspects._implicated
    suspects.withdraw_death(live)
    assert live not in suspects._implicated


async def test_one_that_was_never_accepted_is_tried_like_any_other() -> None:
    suspects = Suspects(1.0)
    guilty, newcomer = placed(), placed()
    newcomer.placed = False
    for _ in range(SUSPICIOUS_DEATHS + 1):
        blamed(suspects, guilty, newcomer)
    assert not newcomer.mailbox.ended
    assert newcomer in suspects
    suspects.count_death(newcomer, trial=guilty)
    assert newcomer in suspects
    suspects.count_death(guilty, trial=guilty)
    assert not newcomer.mailbox.ended
    assert suspects.cleared
