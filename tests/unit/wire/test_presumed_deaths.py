"""An engine that was taken to be dead, and is not, has died of nobody."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.presumed_deaths import PresumedDeaths
from pagewire_frontend.engine_client.suspects import SUSPICIOUS_DEATHS
from tests.unit.wire.test_departures import Engines, request


@pytest.fixture
async def stuck() -> tuple[Engines, EngineLink, LiveRequest]:
    """A request of an engine that was stuck goes on in another."""
    engines = Engines()
    engines.add("a", 1)
    engines.add("b", 2)
    live = await engines.failover.submit(request())
    link = live.link
    assert link is not None
    assert link.session is not None
    link.session.stuck = True  # type: ignore[misc]
    engines.failover.on_changed(link)
    assert live.deaths == 1
    return engines, link, live


def get_on(engines: Engines, link: EngineLink) -> None:
    link.session.stuck = False  # type: ignore[union-attr,misc]
    link._connected = True
    engines.failover.on_changed(link)


async def test_one_that_was_stuck_and_gets_on(
    stuck: tuple[Engines, EngineLink, LiveRequest],
) -> None:
    engines, link, live = stuck
    get_on(engines, link)
    assert live.deaths == 0
    await engines.failover.close()


async def test_deaths_that_were_explained_since_are_not_taken_back_twice(
    stuck: tuple[Engines, EngineLink, LiveRequest],
) -> None:
    engines, link, live = stuck
    live.explain_deaths(0)
    live.deaths += 1  # another engine's
    get_on(engines, link)
    assert live.deaths == 1
    await engines.failover.close()


async def test_requests_that_have_ended_are_kept_by_nothing(
    stuck: tuple[Engines, EngineLink, LiveRequest],
) -> None:
    engines, _, live = stuck
    presumed = engines.failover._presumed
    assert presumed._counted
    engines.failover.abandon(live)
    assert not presumed._counted
    await engines.failover.close()


async def test_all_that_were_lost_one_after_the_other_are_cleared() -> None:
    suspects = MagicMock()
    presumed = PresumedDeaths(suspects)
    link = MagicMock(answering=True)
    link.name, link.session.epoch = "a", 7
    lives = [MagicMock(explained=0) for _ in range(2)]
    for live in lives:
        presumed.note(link, 7, live)
    presumed.settle(link)
    assert [call.args[0] for call in suspects.withdraw_death.call_args_list] == lives


async def test_a_death_that_the_one_on_trial_explains_is_nobody_else_s() -> None:
    engines = Engines()
    engines.add("a")
    live = await engines.failover.submit(request())
    suspects = engines.failover._suspects
    guilty = MagicMock()
    assert not suspects.count_death(live, guilty)
    assert suspects.count_death(live, None)
    assert live.deaths == 1 < SUSPICIOUS_DEATHS
    await engines.failover.close()
