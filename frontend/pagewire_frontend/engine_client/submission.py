"""A request's way into an engine, the first time and each time after.

DESIGN's one rule: a request is its prompt plus what it has produced so far. It is submitted, with
that past, until an engine has accepted it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pagewire.errors import AlreadyExistsError, InternalError, PagewireError, UnavailableError
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client.control import (
    DrainingError,
    TransportError,
    is_session_lost,
)
from pagewire_frontend.engine_client.departures import Departures
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet, described
from pagewire_frontend.engine_client.link import MAX_RETRY_S, MIN_RETRY_S, EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.placement import Placement
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.engine_client.suspects import Suspects

_logger = logging.getLogger(__name__)

_SUBMITS_AT_ONCE = 16


class Submission:
    """Sees to it that requests have a place. One task at a time does so for each of them, whatever
    becomes of engines meanwhile.

    Args:
        fleet: the engines.
        suspects: those that may be what kills engines.
        placement: which engine a request may go to.
        departures: tells engines what leaves them.
        window_s: how long a request may be without an engine.
        counts: where moves and resumptions are counted.
        spawn: runs a task until the client is closed.
    """

    def __init__(
        self,
        fleet: Fleet,
        suspects: Suspects,
        placement: Placement,
        departures: Departures,
        *,
        window_s: float,
        counts: FailoverCounts,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self._placement = placement
        self._departures = departures
        self._window_s = window_s
        self._counts = counts
        self._spawn = spawn
        # Those that are being submitted; by a task of ours, or by their first submission.
        self._placing: dict[LiveRequest, asyncio.Task[None] | None] = {}
        self._slots = asyncio.Semaphore(_SUBMITS_AT_ONCE)

    async def first(self, live: LiveRequest) -> None:
        """Submits a request that is new; returns once an engine has accepted it.

        Raises:
            UnavailableError: the window is over.
            PagewireError: the engine refuses it.
        """
        self._placing[live] = None
        try:
            await self._settle(live)
        finally:
            self._placing.pop(live, None)

    def again(self, live: LiveRequest, reason: str) -> None:
        """Has a request submitted again, unless that is under way."""
        if not live.mailbox.ended and live not in self._placing:
            _logger.debug("request %s is submitted again: %s", live.request.request_id, reason)
            self._counts.moves[reason] += 1
            self._placing[live] = self._spawn(self._resubmit(live))

    def move(self, live: LiveRequest, reason: str) -> None:
        """Gives a request that an engine could go on with to another one."""
        self._departures.tell(live)
        live.leave()
        self.again(live, reason)

    def withdraw(self, live: LiveRequest) -> None:
        """A request need not be submitted any more."""
        task = self._placing.pop(live, None)
        if task is not None:
            task.cancel()

    def unavailable(self) -> UnavailableError:
        """The window is over: why no engine is there."""
        links = list(self._fleet.links.values())
        errors = {link.last_error: None for link in links}
        return UnavailableError(
            f"{described(links)} could not be reached for {self._window_s:g} s: {'; '.join(errors)}"
        )

    async def _settle(self, live: LiveRequest) -> None:
        """Sees to it that an engine has accepted a request, or that it has ended.

        Raises:
            UnavailableError: the window is over.
            PagewireError: the engine refuses it.
        """
        while not live.accepted and not live.mailbox.ended:
            if live in self._suspects:
                await self._suspects.try_alone(live, self._place)
            elif live.placed:
                async with self._slots:
                    await self._place(live)
            else:
                await self._place(live)

    async def _place(self, live: LiveRequest) -> None:
        """Submits a request, with its past, until an engine has accepted it, it has ended, or it
        may not be submitted without a trial.

        Raises:
            UnavailableError: the window is over.
            PagewireError: the engine refuses it.
        """
        delay = MIN_RETRY_S
        was_elsewhere = live.number > 0
        while not live.mailbox.ended:
            link = await self._link_for(live)
            session = None if link is None else link.session
            if link is None or session is None:
                return
            if live.session is not session:
                self._placement.join(live, link, session)
            try:
                await self._submit_to(link, session, live)
                return
            except _MovedError:
                was_elsewhere = True
            except DrainingError:
                # Not this Submit; but one before may have arrived whose answer was lost.
                link.note_draining()
                if live.session is session:
                    self._departures.tell(live)
                    live.leave()
            except TransportError as error:
                # It may have arrived: the same number and id again are the same request.
                link.last_error = error.message
                link.renew_channel()
                was_elsewhere = True
                if time.monotonic() - live.waiting_since > self._window_s:
                    self._departures.tell(live)
                    raise self.unavailable() from None
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_S)
            except AlreadyExistsError:
                # It had left that engine, which has not heard, or has got an earlier Submit since.
                if not was_elsewhere or time.monotonic() - live.waiting_since > self._window_s:
                    raise
                await self._departures.tell_of_any(link, session, live)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_S)

    async def _submit_to(self, link: EngineLink, session: WireSession, live: LiveRequest) -> None:
        """One Submit.

        Raises:
            TransportError: whether the engine has the request is not known.
            _MovedError: the request has meanwhile left; who made it leave has told the engine.
            PagewireError: the engine refuses it.
        """
        number, records = live.number, live.mailbox.sequences
        try:
            accepted = await link.control.submit(
                session.session_id,
                number,
                live.request,
                seed=live.seed,
                past=records if live.placed or live.request.past else None,
                adapter_version=live.adapter_version,
            )
        except PagewireError as error:
            if live.mailbox.ended:
                return  # a Submit that seemed lost had arrived, and all has come of it since
            if live.session is not session or live.number != number:
                raise _MovedError from None
            if is_session_lost(error):
                session.give_up(error.message)
                raise TransportError(error.message) from None
            raise
        if live.mailbox.ended:
            return  # all has come before the answer, or nobody wants it: who ended it has said so
        if live.session is not session or live.number != number:
            raise _MovedError
        if live.placed and live.accepted_in is not session:
            live.resumptions += 1
            self._counts.resumed_requests += 1
        live.accepted_in = session
        live.seed, live.placed = accepted.seed, True
        live.adapter_version = accepted.adapter_version
        for index in live.open_at_first:
            if records[index].finish_reason is FinishReason.STOP:
                self._departures.tell(live, index, FinishReason.STOP)

    async def _link_for(self, live: LiveRequest) -> EngineLink | None:
        """The engine to submit to, once there is one and it need not wait for trials of others; for
        a suspect, once one is rid of what is unproven, which is sent away. None when the request
        has ended meanwhile, or must be tried.

        Raises:
            UnavailableError: there was none within the window.
        """
        while True:
            if live.mailbox.ended or self._suspects.awaits_trial(live):
                return None
            for other in self._placement.make_room_for(live):
                self.move(other, "trial")
            link = self._placement.choose(live)
            if link is not None:
                return link
            if self._placement.waits_for_verdicts(live):
                await self._suspects.wait_for_verdicts(live)
                continue
            # Engines that have been gone for longer than the window keep nobody waiting.
            since = live.waiting_since
            if not self._fleet.ready:
                since = min(since, self._fleet.lost_at)
            rest_s = since + self._window_s - time.monotonic()
            if not await self._fleet.wait_for_news(rest_s) and rest_s <= 0:
                self._departures.tell(live)
                raise self.unavailable()

    async def _resubmit(self, live: LiveRequest) -> None:
        try:
            await self._settle(live)
        except PagewireError as error:
            live.mailbox.fail(error)
        except Exception:
            _logger.exception("request %s could not be submitted again", live.request.request_id)
            live.mailbox.fail(InternalError("the request could not be submitted again"))
        finally:
            if self._placing.get(live) is asyncio.current_task():
                del self._placing[live]


class _MovedError(Exception):
    """A request was given another place while it was being submitted."""
