"""Every live request has a place in one of the engines, and another when that one goes: when an
engine's life or our session in it ends, or it drains, each live request of it is submitted again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from pagewire.errors import (
    InternalError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.control import TransportError
from pagewire_frontend.engine_client.departures import Departures
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet
from pagewire_frontend.engine_client.link import EngineLink, LinkState
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.placement import Placement
from pagewire_frontend.engine_client.presumed_deaths import PresumedDeaths
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.engine_client.submission import Submission
from pagewire_frontend.engine_client.suspects import Suspects

_logger = logging.getLogger(__name__)


class Failover:
    """Places requests, and places them again. Implements `LinkEvents`.

    Args:
        fleet: the engines.
        window_s: how long a request may be without an engine.
        prepare: gives an engine what it must have before it gets requests.
        counts: where losses, moves and resumptions are counted.
    """

    def __init__(
        self,
        fleet: Fleet,
        window_s: float,
        prepare: Callable[[EngineLink, ModelInfo], Awaitable[None]],
        counts: FailoverCounts,
    ) -> None:
        self._counts = counts
        self._fleet = fleet
        self._window_s = window_s
        self._prepare = prepare
        self._lives: dict[LiveRequest, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._suspects = Suspects(window_s)
        self._presumed = PresumedDeaths(self._suspects)
        self._placement = Placement(fleet, self._suspects)
        self._departures = Departures(self._spawn, window_s)
        self._submission = Submission(
            fleet,
            self._suspects,
            self._placement,
            self._departures,
            window_s=window_s,
            counts=counts,
            spawn=self._spawn,
        )

    async def submit(self, request: EngineRequest) -> LiveRequest:
        """Hands a request over; returns once an engine has accepted it."""
        identity = self._fleet.identity
        live = LiveRequest(request, self._forget, None if identity is None else identity.stream)
        self._lives[live] = None
        try:
            await self._submission.first(live)
        except BaseException as error:
            refused = isinstance(error, PagewireError) and not isinstance(error, TransportError)
            self.abandon(live, tell=not refused)
            raise
        return live

    def abandon(self, live: LiveRequest, *, tell: bool = True) -> asyncio.Task[None] | None:
        """Nobody wants a request's tokens any more.

        Returns:
            The task that tells the engine, where it needs telling.
        """
        if live not in self._lives:
            return None
        self._submission.withdraw(live)
        told = self._departures.tell(live) if tell else None
        live.mailbox.mute_all(FinishReason.ABORT)
        self._forget(live)
        return told

    def finish_sequence(self, live: LiveRequest, index: int) -> asyncio.Task[None] | None:
        """A stop string ended a sequence here."""
        told = None
        if live.mailbox.sequences[index].finish_reason is None:
            # With the last one the whole request: that refuses a Submit which is still on its way.
            of = index if live.mailbox.num_open > 1 else None
            told = self._departures.tell(live, of, FinishReason.STOP)
        live.mailbox.mute(index, FinishReason.STOP)
        return told

    async def close(self) -> None:
        """Ends all that lives, here; the engines hear of it by the end of their sessions."""
        for live in list(self._lives):
            self.abandon(live, tell=False)
        for timer in self._expiries.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, live: LiveRequest) -> None:
        """The request has ended, one way or another."""
        suspected = live in self._suspects
        # Here too, since its resubmission may never have begun: all others would wait for it.
        self._suspects.forget(live)
        if suspected:
            self._fleet.announce()  # it may wait for an engine to be tried in, and others for that
        self._presumed.forget(live)
        if live in self._lives:
            del self._lives[live]
            live.part()

    async def prepare(self, link: EngineLink, info: ModelInfo) -> None:
        """See LinkEvents."""
        await self._prepare(link, info)

    def on_connected(self, link: EngineLink, replaced: WireSession | None) -> None:
        """See LinkEvents."""
        twin = self._fleet.twin_of(link)
        if (twin is not None) != link.duplicate:
            link.duplicate = twin is not None
            if twin is not None:
                _logger.info("%s and %s are the same engine", link.name, twin.name)
        timer = self._expiries.pop(link.name, None)
        if timer is not None:
            timer.cancel()
        self._fleet.choose_model()
        self._fleet.note_connected(link)
        if replaced is not None:
            self._on_new_session(link, replaced)
        self.on_changed(link)

    def _on_new_session(self, link: EngineLink, replaced: WireSession) -> None:
        """What ran in the old session of an engine is gone."""
        session = link.session
        assert session is not None
        another_life = session.epoch != replaced.epoch
        self._placement.forget_cache_of(link, another_life)
        died = another_life and replaced.epoch != link.stopped_epoch
        _logger.info(
            "%s; %d live requests are submitted again",
            "the engine died and is back" if died else "the engine has a new session for us",
            len(link.lives),
        )
        reason = "death" if died else "drain" if another_life else "session"
        self._lose(link.lives.values(), replaced, reason)

    def on_lost(self, link: EngineLink) -> None:
        """See LinkEvents."""
        self._counts.connections_lost += 1
        for live in link.lives.values():
            if live.placed:
                live.waiting_since = link.lost_at
        loop = asyncio.get_running_loop()
        self._expiries[link.name] = loop.call_later(self._window_s, self._expire, link)
        self._fleet.choose_model()
        self._fleet.announce()

    def on_changed(self, link: EngineLink) -> None:
        """See LinkEvents."""
        self._presumed.settle(link)
        self._fleet.choose_model()
        self._fleet.announce()
        for each in list(self._fleet.links.values()):
            self._rescue(each)

    def _rescue(self, link: EngineLink) -> None:
        """Moves the requests of an engine that is away, stuck or draining to those that can take
        them. Where there is none, they stay: it may come back to them, or end them."""
        state = link.state
        if not link.lives or state in (LinkState.READY, LinkState.RETIRED):
            return
        if state is LinkState.AWAY and not link.away:
            return  # the connection may only have been cut
        session = link.session
        if state is LinkState.AWAY and not link.died:
            self._fail_those_of_another_model(link)
        movable = [live for live in link.lives.values() if self._placement.has_another(live, link)]
        if not movable or session is None:
            return
        _logger.warning(
            "%d live requests of the engine at %s, which is %s, go to others",
            len(movable),
            link.name,
            state.value,
        )
        if state in (LinkState.DRAINING, LinkState.OTHER_MODEL):
            for live in movable:
                self._submission.move(live, "drain")
            return
        self._placement.forget_cache_of(link, True)
        died = state is LinkState.STUCK or link.died
        some_stay = len(movable) < len(link.lives)
        if some_stay:
            # Else the session is ended, and all of it with that.
            for live in movable:
                self._departures.tell(live)
        counted = self._lose(movable, session, "death" if died else "drain")
        for live in counted:
            self._presumed.note(link, session.epoch, live)
        if not some_stay:
            link.abandon_session()

    def _fail_those_of_another_model(self, link: EngineLink) -> None:
        for live in list(link.lives.values()):
            if not self._placement.has_model(live):
                live.mailbox.fail(
                    UnavailableError(
                        "the engine has stopped, and those that are left serve another model"
                    )
                )

    def _lose(
        self, lost: Iterable[LiveRequest], session: WireSession, reason: str
    ) -> list[LiveRequest]:
        """Requests whose session is over go elsewhere.

        Returns:
            Those against whom its death counts.
        """
        trial = self._suspects.on_trial_in(session)
        counted = []
        for live in list(lost):
            live.leave()
            if reason == "death" and self._suspects.count_death(live, trial, lagged=session.lagged):
                counted.append(live)
            if not self._placement.has_model(live):
                # Those never accepted too: their prompts are in the other model's tokens.
                live.mailbox.fail(UnavailableError("the engine came back with another model"))
            else:
                self._submission.again(live, reason)
        return [live for live in counted if not live.mailbox.ended]

    def _expire(self, link: EngineLink) -> None:
        """The window is over for all that lived when the engine was lost."""
        self._expiries.pop(link.name, None)
        error = self._submission.unavailable()
        _logger.error("%s", error.message)
        for live in list(link.lives.values()):
            if live.placed and time.monotonic() - live.waiting_since >= self._window_s - 0.1:
                live.mailbox.fail(error)
        self._fleet.choose_model()
        self._fleet.announce()

    def on_vacant(self, link: EngineLink) -> None:
        """See LinkEvents."""
        self._fleet.announce()

    def on_failure(self, link: EngineLink, number: int, error: PagewireError) -> None:
        """See LinkEvents. A request that a draining engine gives back goes elsewhere."""
        live = link.lives.get(number)
        if live is None:
            return
        if isinstance(error, UnavailableError):
            live.leave()
            self._submission.again(live, "drain")
            return
        ended_here = isinstance(error, InternalError | ResourceExhaustedError)
        if ended_here:
            self._departures.tell(live)
        live.mailbox.fail(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
