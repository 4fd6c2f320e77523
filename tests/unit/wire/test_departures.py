"""An engine hears of all that need not go on in it, however that overtakes what is on its way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from pagewire.errors import AlreadyExistsError, UnavailableError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire.v1.token_deltas_pb2 import Heartbeat
from pagewire_frontend.engine_client import link as link_module
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.control import DrainingError, TransportError
from pagewire_frontend.engine_client.failover import Failover
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet
from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest

ACCEPTED = SimpleNamespace(seed=1, adapter_version="")


async def unprepared(link: EngineLink, info: ModelInfo) -> None: ...


class Engines:
    """Links to engines of which the tests play the control APIs."""

    def __init__(self, window_s: float = 60.0) -> None:
        self.fleet = Fleet(window_s)
        self.failover = Failover(self.fleet, window_s, unprepared, FailoverCounts())

    def add(self, name: str, epoch: int = 1) -> EngineLink:
        link = EngineLink(name, lambda: AsyncMock(outdated=False), self.failover)  # type: ignore[arg-type]
        session = MagicMock(epoch=epoch, stuck=False, connected=True, lagged=False, streams={})
        session.next_number = itertools.count(1).__next__
        link.session, link._connected, link.away = session, True, False
        link.control.submit.return_value = ACCEPTED  # type: ignore[attr-defined]
        self.fleet.links[name] = link
        return link


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    engines = Engines()
    yield engines
    await engines.failover.close()


def request(n: int = 1) -> EngineRequest:
    return EngineRequest("r", [1], SamplingParams(n=n))


def aborts(link: EngineLink) -> list[tuple[Any, ...]]:
    """Of each: the sequence, the reason and the stream."""
    calls = link.control.abort.call_args_list  # type: ignore[attr-defined]
    return [call.args[2:] for call in calls]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_suspect_comes_before_the_request_that_must_leave_for_it(engines: Engines) -> None:
    link = engines.add("a")
    live = await engines.failover.submit(request())
    engines.failover._departures.tell(live)
    # Not only once the task that tells the engine has begun.
    assert not link.vacancy.clear


async def test_a_suspect_is_tried_as_soon_as_a_heartbeat_says_that_its_engine_is_empty(
    engines: Engines,
) -> None:
    link = engines.add("a")
    await engines.failover.submit(request())
    suspect = await engines.failover.submit(request())
    suspects = engines.failover._suspects
    for _ in range(2):
        suspects.count_death(suspect, trial=None)
    suspect.leave()
    engines.failover._submission.again(suspect, "death")
    await settled()
    assert aborts(link) == [(None, FinishReason.ABORT, 1)]
    for _ in range(2):
        assert not suspect.accepted
        link._on_heartbeat(Heartbeat(step=1, busy=False))
    await settled()
    assert suspect.accepted


async def test_a_stop_string_that_overtakes_a_submit_ends_the_whole_request(
    engines: Engines,
) -> None:
    link = engines.add("a")
    live = await engines.failover.submit(request(n=2))
    engines.failover.finish_sequence(live, 1)
    engines.failover.finish_sequence(live, 0)
    await settled()
    # Of the whole the engine takes note even where the stream has not come yet.
    assert aborts(link) == [(1, FinishReason.STOP, 1), (None, FinishReason.STOP, 1)]


async def test_a_stop_string_between_two_submits_of_a_stream_is_told_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire_frontend.engine_client.submission.MIN_RETRY_S", 0.1)
    link = engines.add("a")
    live = await engines.failover.submit(request(n=2))
    live.leave()
    answers = [TransportError("its answer is lost"), ACCEPTED]
    link.control.submit.side_effect = answers  # type: ignore[attr-defined]
    engines.failover._submission.again(live, "session")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engines.failover.finish_sequence(live, 0)
    await settled()
    first = aborts(link)
    assert first == [(0, FinishReason.STOP, 2)]
    await asyncio.wait_for(asyncio.gather(*engines.failover._submission._placing.values()), 30)  # type: ignore[arg-type]
    await settled()
    assert aborts(link) == first * 2


async def test_a_request_goes_elsewhere_though_the_engine_that_still_has_it_does_not_answer(
    engines: Engines,
) -> None:
    first, second = engines.add("a", 1), engines.add("b", 2)
    live = await engines.failover.submit(request())
    had, other = (first, second) if live.link is first else (second, first)
    live.leave()
    other.draining = True
    had.control.submit.side_effect = AlreadyExistsError("it lives")  # type: ignore[attr-defined]
    dead = asyncio.Event()

    async def abort(*_: object) -> None:
        dead.set()
        raise TransportError("it is dead")

    had.control.abort = abort  # type: ignore[method-assign,assignment]
    engines.failover._submission.again(live, "death")
    await asyncio.wait_for(dead.wait(), 30)
    had._connected, other.draining = False, False
    live.leave()
    for _ in range(200):
        if live.link is other and live.accepted:
            break
        await asyncio.sleep(0.05)
    assert live.link is other


async def test_what_an_old_session_of_the_same_life_ran_may_be_in_the_step_under_way(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = engines.add("a", epoch=1)
    sessions = [MagicMock(epoch=1, stuck=False), MagicMock(epoch=2, stuck=False)]
    for session in sessions:
        session.connect = AsyncMock()
    made = iter(sessions)
    monkeypatch.setattr(link_module, "WireSession", lambda *_: next(made))
    monkeypatch.setattr(link_module.ReplicaIdentity, "of", MagicMock())
    for epoch, clear in ((1, False), (2, True)):
        link.control.attach.return_value = MagicMock(epoch=epoch, resumed=False, draining=False)  # type: ignore[attr-defined]
        link.control.model_info.return_value = MagicMock(epoch=epoch)  # type: ignore[attr-defined]
        await link._connect()
        assert link.vacancy.clear is clear


async def test_an_engine_without_a_connection_is_told_when_it_is_back(engines: Engines) -> None:
    link = engines.add("a")
    live = await engines.failover.submit(request())
    link._connected = False
    told = engines.failover.abandon(live)
    await settled()
    assert told is not None
    assert not aborts(link)
    link._connected = True
    await asyncio.wait_for(told, 30)
    assert aborts(link) == [(None, FinishReason.ABORT, 1)]


async def test_an_engine_that_is_given_up_is_told_nothing(engines: Engines) -> None:
    link = engines.add("a")
    live = await engines.failover.submit(request())
    link._connected = False
    told = engines.failover.abandon(live)
    await settled()
    await link.close()
    assert told is not None
    await asyncio.wait_for(told, 30)
    assert not aborts(link)


async def test_an_engine_that_drains_may_have_had_an_earlier_submit(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire_frontend.engine_client.submission.MIN_RETRY_S", 0.001)
    link, other = engines.add("a", 1), engines.add("b", 2)
    other.draining = True
    answers = [TransportError("its answer is lost"), DrainingError("it drains")]
    link.control.submit.side_effect = answers  # type: ignore[attr-defined]
    drains = asyncio.Event()

    def note_draining() -> None:
        link.draining = True
        drains.set()

    monkeypatch.setattr(link, "note_draining", note_draining)
    submitted = asyncio.create_task(engines.failover.submit(request()))
    await drains.wait()
    other.draining = False
    engines.fleet.announce()
    live = await asyncio.wait_for(submitted, 30)
    assert live.link is other
    assert aborts(link) == [(None, FinishReason.ABORT, 1)]


async def test_one_that_finds_no_engine_in_time_is_not_left_where_it_may_have_arrived() -> None:
    engines = Engines(window_s=0.05)
    link = engines.add("a")
    link.control.submit.side_effect = TransportError("its answer is lost")  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(engines.failover.submit(request()), 30)
    await settled()
    assert aborts(link) == [(None, FinishReason.ABORT, 1)]
    await engines.failover.close()


async def test_a_submit_that_was_begun_before_may_be_what_exists_already(engines: Engines) -> None:
    link = engines.add("a")
    link.control.submit.side_effect = [AlreadyExistsError("it lives"), ACCEPTED]  # type: ignore[attr-defined]
    live = LiveRequest(request(), lambda live: None)
    live.number = 1  # in an earlier place, which did not answer
    await asyncio.wait_for(engines.failover._submission._place(live), 30)
    assert live.accepted
    assert aborts(link) == [(None, FinishReason.ABORT, None)]
