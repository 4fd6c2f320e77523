"""Every live request has a place in one of the engines, and another when that one goes.

DESIGN's one rule: a request is its prompt plus what it has produced so far. When an engine's life
or our session in it ends, or it drains, each live request of it is submitted again with its past.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from pagewire.errors import (
    AlreadyExistsError,
    InternalError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.control import (
    DrainingError,
    TransportError,
    is_session_lost,
)
from pagewire_frontend.engine_client.departures import Departures
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet, described
from pagewire_frontend.engine_client.link import MAX_RETRY_S, MIN_RETRY_S, EngineLink, LinkState
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.placement import Placement
from pagewire_frontend.engine_client.presumed_deaths import PresumedDeaths
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.engine_client.suspects import Suspects

_logger = logging.getLogger(__name__)

_SUBMITS_AT_ONCE = 16
_VACANCY_LOOK_S = 0.05


class Failover:
    """Places requests, and places them again. Implements `LinkEvents`.

    Args:
        fleet: the engines.
        window_s: how long a request may be without an engine.
        prepare: gives an engine what it must have before it gets requests.
        counts: where losses and resumptions are counted.

    Attributes:
        moves: requests that were submitted again, by the reason.
    """

    def __init__(
        self,
        fleet: Fleet,
        window_s: float,
        prepare: Callable[[EngineLink, ModelInfo], Awaitable[None]],
        counts: FailoverCounts | None = None,
    ) -> None:
        self._counts = counts or FailoverCounts()
        self.moves: Counter[str] = Counter()
        self._fleet = fleet
        self._window_s = window_s
        self._prepare = prepare
        self._lives: dict[LiveRequest, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Those that are being submitted; by a task of ours, or by their first submission.
        self._placing: dict[LiveRequest, asyncio.Task[None] | None] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._submit_slots = asyncio.Semaphore(_SUBMITS_AT_ONCE)
        self._suspects = Suspects(self._place, window_s)
        self._presumed = PresumedDeaths(self._suspects)
        self._placement = Placement(fleet, self._suspects)
        self._departures = Departures(self._spawn, window_s)

    # -- requests --------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> LiveRequest:
        """Hands a request over; returns once an engine has accepted it."""
        identity = self._fleet.identity
        live = LiveRequest(request, self._forget, None if identity is None else identity.stream)
        self._lives[live] = None
        self._placing[live] = None
        try:
            await self._settle(live)
        except BaseException as error:
            refused = isinstance(error, PagewireError) and not isinstance(error, TransportError)
            self.abandon(live, tell=not refused)
            raise
        finally:
            self._placing.pop(live, None)
        return live

    def abandon(self, live: LiveRequest, *, tell: bool = True) -> asyncio.Task[None] | None:
        """Nobody wants a request's tokens any more.

        Returns:
            The task that tells the engine, where it needs telling.
        """
        if live not in self._lives:
            return None
        task = self._placing.pop(live, None)
        if task is not None:
            task.cancel()
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
        # Here too, since its resubmission may never have begun: all others would wait for it.
        self._suspects.acquit(live)
        self._presumed.forget(live)
        if live in self._lives:
            del self._lives[live]
            live.part()

    # -- placing ---------------------------------------------------------------------------------

    async def _settle(self, live: LiveRequest) -> None:
        """Sees to it that an engine has accepted a request, or that it has ended. One task at a
        time does so for each request, whatever becomes of engines meanwhile.

        Raises:
            UnavailableError: the window is over.
            PagewireError: the engine refuses it.
        """
        while not live.accepted and not live.mailbox.ended:
            if live in self._suspects:
                await self._suspects.try_alone(live)
            elif live.placed:
                async with self._submit_slots:
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
                was_elsewhere = True
                if time.monotonic() - live.waiting_since > self._window_s:
                    self._departures.tell(live)
                    raise self._unavailable() from None
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
                self._move(other, "trial")
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
            look_s = min(rest_s, _VACANCY_LOOK_S) if live in self._suspects else rest_s
            if not await self._fleet.wait_for_news(look_s) and rest_s <= 0:
                self._departures.tell(live)
                raise self._unavailable()

    def _move(self, live: LiveRequest, reason: str) -> None:
        """Gives a request that an engine could go on with to another one."""
        self._departures.tell(live)
        live.leave()
        self._send_for(live, reason)

    def _send_for(self, live: LiveRequest, reason: str) -> None:
        """Has a request submitted again, unless that is under way."""
        if not live.mailbox.ended and live not in self._placing:
            _logger.debug("request %s is submitted again: %s", live.request.request_id, reason)
            self.moves[reason] += 1
            self._placing[live] = self._spawn(self._resubmit(live))

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
            if self._suspects.cleared:
                self._fleet.announce()

    # -- what becomes of engines -----------------------------------------------------------------

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
                self._move(live, "drain")
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
                self._send_for(live, reason)
        return [live for live in counted if not live.mailbox.ended]

    def _expire(self, link: EngineLink) -> None:
        """The window is over for all that lived when the engine was lost."""
        self._expiries.pop(link.name, None)
        error = self._unavailable()
        _logger.error("%s", error.message)
        for live in list(link.lives.values()):
            if live.placed and time.monotonic() - live.waiting_since >= self._window_s - 0.1:
                live.mailbox.fail(error)
        self._fleet.choose_model()
        self._fleet.announce()

    def on_failure(self, link: EngineLink, number: int, error: PagewireError) -> None:
        """See LinkEvents. A request that a draining engine gives back goes elsewhere."""
        live = link.lives.get(number)
        if live is None:
            return
        if isinstance(error, UnavailableError):
            live.leave()
            self._send_for(live, "drain")
            return
        ended_here = isinstance(error, InternalError | ResourceExhaustedError)
        if ended_here:
            self._departures.tell(live)
        live.mailbox.fail(error)

    def _unavailable(self) -> UnavailableError:
        links = list(self._fleet.links.values())
        errors = {link.last_error: None for link in links}
        return UnavailableError(
            f"{described(links)} could not be reached for {self._window_s:g} s: {'; '.join(errors)}"
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _MovedError(Exception):
    """A request was given another place while it was being submitted."""
