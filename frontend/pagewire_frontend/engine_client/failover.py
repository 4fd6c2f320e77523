"""The link to an engine: keeps a session connected, and places every live request in it.

DESIGN's one rule: a request is its prompt plus what it has produced so far. When the engine's life
or our session in it ends, each live request is submitted again with its past.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import zmq

from pagewire.delta_frames import FrameCounts
from pagewire.errors import (
    InternalError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire.tls import ClientTls
from pagewire_frontend.engine_client.adapter_restoring import RememberedAdapters
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.control import (
    ControlChannel,
    TransportError,
    is_session_lost,
)
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.session import Loss, WireSession
from pagewire_frontend.engine_client.suspects import Suspects

_logger = logging.getLogger(__name__)

_RECONNECT_TIMEOUT_S = 3.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_SUBMITS_AT_ONCE = 16
_ABORT_ATTEMPTS = 5
_DETACH_TIMEOUT_S = 2.0


class EngineLink:
    """One engine, through its deaths.

    Args:
        target: HOST:PORT of the control API.
        failover_window_s: how long a request may be without an engine.
        tls: of the control channel; None: it has none.
        counts: where losses and resumptions are counted.
        frames: where what becomes of the delta wire's frames is counted.
    """

    def __init__(
        self,
        target: str,
        failover_window_s: float,
        tls: ClientTls | None = None,
        counts: FailoverCounts | None = None,
        frames: FrameCounts | None = None,
    ) -> None:
        self.counts = counts or FailoverCounts()
        self.adapters = RememberedAdapters()
        self.control = ControlChannel(target, tls)
        self.model_info: ModelInfo | None = None
        self._window_s = failover_window_s
        self._frames = frames
        # The process's own, and never terminated: a client that was dropped without being closed
        # would hang the collector in the termination of a context of its own.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._session: WireSession | None = None
        self._connected = asyncio.Event()
        self._lives: dict[LiveRequest, None] = {}
        self._by_number: dict[int, LiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._resubmitting: dict[LiveRequest, asyncio.Task[None]] = {}
        self._supervisor: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._submit_slots = asyncio.Semaphore(_SUBMITS_AT_ONCE)
        self._stopped_epoch = 0
        self._lost_at = float("inf")
        self._last_error = "it has not been reached yet"
        self._suspects = Suspects(self._place, failover_window_s)
        self._closed = False

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connects for the first time.

        Raises:
            UnavailableError: the engine can't be reached within the window.
            PagewireError: what answers is no engine.
        """
        deadline = time.monotonic() + self._window_s
        delay = _MIN_RETRY_S
        while True:
            try:
                await self._connect()
                break
            except TransportError as error:
                self._last_error = error.message
                if time.monotonic() + delay > deadline:
                    raise self._unavailable() from None
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_RETRY_S)
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-link")

    async def close(self) -> None:
        """Ends our session, which aborts what lives, and disconnects. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for live in list(self._lives):
            self.abandon(live, tell=False)
        try:
            await self._detach()
        finally:
            self._connected.clear()
            if self._expiry is not None:
                self._expiry.cancel()
            tasks = [*self._tasks, *([self._supervisor] if self._supervisor else [])]
            for task in tasks:
                task.cancel()
            # Their sockets first: a descriptor must leave the event loop before it is closed.
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._session is not None:
                self._session.disconnect()
            await self.control.close()

    async def _detach(self) -> None:
        """Best effort: a session that is not ended is buried by the engine after its silence."""
        session = self._session
        if session is None or not self._connected.is_set():
            return
        try:
            await self.control.detach(
                session.session_id, session.secret, timeout_s=_DETACH_TIMEOUT_S
            )
        except PagewireError as error:
            _logger.debug("the engine did not hear our farewell: %s", error)

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be taken up at once."""
        session = self._session
        return (
            self._connected.is_set()
            and session is not None
            and session.connected
            and not session.stuck
        )

    # -- requests --------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> LiveRequest:
        """Hands a request over; returns once an engine has accepted it."""
        if self._closed or self._session is None:
            raise UnavailableError("the engine client is not running")
        live = LiveRequest(request, self._forget)
        self._lives[live] = None
        try:
            await self._place(live)
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
        session = live.session
        if live not in self._lives:
            return None
        task = self._resubmitting.pop(live, None)
        if task is not None:
            task.cancel()
        live.mailbox.mute_all(FinishReason.ABORT)
        self._forget(live)
        if session is None or not tell:
            return None
        return self._spawn(self._tell_abort(session, live, None, FinishReason.ABORT))

    def finish_sequence(self, live: LiveRequest, index: int) -> asyncio.Task[None] | None:
        """A stop string ended a sequence here."""
        session = live.session
        record = live.mailbox.sequences[index]
        ended_before = record.finish_reason is not None
        live.mailbox.mute(index, FinishReason.STOP)
        if ended_before or session is None:
            return None
        return self._spawn(self._tell_abort(session, live, index, FinishReason.STOP))

    def _forget(self, live: LiveRequest) -> None:
        """The request has ended, one way or another."""
        # Here too, since its resubmission may never have begun: all others would wait for it.
        self._suspects.acquit(live)
        if live in self._lives:
            del self._lives[live]
            self._by_number.pop(live.number, None)
            if live.session is not None:
                live.session.streams.pop(live.number, None)

    async def _tell_abort(
        self, session: WireSession, live: LiveRequest, index: int | None, reason: FinishReason
    ) -> None:
        """Tells the engine until it has heard; a session that is over has aborted all it had."""
        for attempt in range(_ABORT_ATTEMPTS):
            if session is not self._session:
                return
            try:
                await self.control.abort(session.session_id, live.request.request_id, index, reason)
                return
            except TransportError:
                await asyncio.sleep(_MIN_RETRY_S * 2**attempt)
            except PagewireError as error:
                if not is_session_lost(error):
                    _logger.warning("an abort was refused: %s", error)
                return

    # -- placing ---------------------------------------------------------------------------------

    async def _place(self, live: LiveRequest) -> None:
        """Submits a request, with its past, until an engine has accepted it.

        Raises:
            UnavailableError: the window is over.
            PagewireError: the engine refuses it.
        """
        delay = _MIN_RETRY_S
        while not live.mailbox.ended:
            session = await self._session_for(live)
            if live.mailbox.ended:
                return
            if live.session is not session:
                live.join(session)
                self._by_number[live.number] = live
            records = live.mailbox.sequences
            open_before = [i for i, record in enumerate(records) if record.finish_reason is None]
            try:
                accepted = await self.control.submit(
                    session.session_id,
                    live.number,
                    live.request,
                    seed=live.seed,
                    past=records if live.placed or live.request.past else None,
                    adapter_version=live.adapter_version,
                )
            except TransportError as error:
                # It may have arrived: the same number and id again are the same request.
                self._last_error = error.message
                if time.monotonic() - live.waiting_since > self._window_s:
                    raise self._unavailable() from None
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_RETRY_S)
                continue
            except PagewireError as error:
                if live.mailbox.ended:
                    return  # a Submit that seemed lost had arrived, and all has come of it since
                if not is_session_lost(error):
                    raise
                session.give_up(error.message)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_RETRY_S)
                continue
            if live.session is not session:
                # The session ended while the answer was on its way.
                continue
            if live.placed:
                live.resumptions += 1
                self.counts.resumed_requests += 1
            live.seed, live.placed = accepted.seed, True
            live.adapter_version = accepted.adapter_version
            for index in open_before:
                ended = records[index].finish_reason
                if ended is FinishReason.STOP and not live.mailbox.ended:
                    self._spawn(self._tell_abort(session, live, index, ended))
            return

    async def _session_for(self, live: LiveRequest) -> WireSession:
        """The session to submit to, once there is one and no suspect is on trial."""
        while True:
            if not self._connected.is_set():
                # An engine that has been gone for longer than the window keeps nobody waiting.
                since = min(live.waiting_since, self._lost_at)
                rest_s = since + self._window_s - time.monotonic()
                try:
                    async with asyncio.timeout(max(0.0, rest_s)):
                        await self._connected.wait()
                except TimeoutError:
                    raise self._unavailable() from None
            if not self._suspects.cleared and live not in self._suspects:
                await self._suspects.wait_for_verdicts(live)
            elif self._session is not None and self._connected.is_set():
                return self._session

    async def _resubmit(self, live: LiveRequest) -> None:
        try:
            if live in self._suspects:
                await self._suspects.try_alone(live)
            else:
                async with self._submit_slots:
                    await self._place(live)
        except PagewireError as error:
            live.mailbox.fail(error)
        finally:
            self._suspects.acquit(live)
            if self._resubmitting.get(live) is asyncio.current_task():
                del self._resubmitting[live]

    # -- the connection --------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            session = self._session
            assert session is not None
            # Not the future itself: our cancellation would be its result.
            await asyncio.wait((session.lost,))
            self._on_loss(session, session.lost.result())
            delay = _MIN_RETRY_S
            while True:
                try:
                    await self._connect()
                    break
                except PagewireError as error:
                    self._last_error = error.message
                except Exception:
                    _logger.exception("reconnecting to the engine failed")
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_RETRY_S)

    def _on_loss(self, session: WireSession, loss: Loss) -> None:
        _logger.warning("lost the engine at %s: %s", self.control.target, loss.reason)
        self._last_error = loss.reason
        self.counts.connections_lost += 1
        self._connected.clear()
        session.disconnect()
        if loss.on_purpose:
            self._stopped_epoch = session.epoch
        now = self._lost_at = time.monotonic()
        for live in self._lives:
            if live.placed:
                live.waiting_since = now
        self._expiry = asyncio.get_running_loop().call_later(self._window_s, self._expire)

    def _expire(self) -> None:
        """The window is over for all that lived when the engine was lost."""
        error = self._unavailable()
        _logger.error("%s", error.message)
        for live in list(self._lives):
            if live.placed and time.monotonic() - live.waiting_since >= self._window_s - 0.1:
                live.mailbox.fail(error)

    async def _connect(self) -> None:
        """One attempt to take our session over, or else to open another."""
        old = self._session
        attached = await self.control.attach(
            old.session_id if old else "",
            old.secret if old else "",
            timeout_s=_RECONNECT_TIMEOUT_S,
        )
        if old is not None and attached.resumed and attached.epoch == old.epoch:
            await old.connect(attached)
            _logger.info("the engine's session goes on")
        else:
            info = await self.control.model_info()
            if info.epoch != attached.epoch:
                raise TransportError("the engine restarted while we attached")
            if old is not None and old.epoch != attached.epoch:
                await self.adapters.restore(self.control, self._window_s)
            session = WireSession(
                attached, self.control.host, self._context, self._on_failure, self._frames
            )
            await session.connect(attached)
            self._adopt(session, info)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._lost_at = float("inf")
        self._connected.set()

    def _adopt(self, session: WireSession, info: ModelInfo) -> None:
        """Makes a new session the present one, and sends for every request of the old."""
        old, old_info = self._session, self.model_info
        self._session, self.model_info = session, info
        self._by_number.clear()
        if old is None:
            return
        died = old.epoch != session.epoch and old.epoch != self._stopped_epoch
        _logger.info(
            "%s; %d live requests are submitted again",
            "the engine died and is back" if died else "the engine has a new session for us",
            len(self._lives),
        )
        trial = self._suspects.on_trial_in(old)
        other = old_info is not None and _identity(old_info) != _identity(info)
        for live in list(self._lives):
            in_flight = live.session is old
            live.leave()
            if in_flight and died:
                self._suspects.count_death(live, trial)
            if other:
                # Those never accepted too: their prompts are in the other model's tokens.
                live.mailbox.fail(UnavailableError("the engine came back with another model"))
            elif live.placed and not live.mailbox.ended and live not in self._resubmitting:
                self._send_for(live)
        old.streams.clear()

    def _send_for(self, live: LiveRequest) -> None:
        task = self._spawn(self._resubmit(live))
        self._resubmitting[live] = task

    def _on_failure(self, number: int, error: PagewireError) -> None:
        """A request failed in the engine. One that a draining engine gives back goes elsewhere."""
        live = self._by_number.get(number)
        if live is None:
            return
        if isinstance(error, UnavailableError):
            live.leave()
            if live.placed and live not in self._resubmitting:
                self._send_for(live)
            return
        ended_here = isinstance(error, InternalError | ResourceExhaustedError)
        if ended_here and live.session is not None:
            self._spawn(self._tell_abort(live.session, live, None, FinishReason.ABORT))
        live.mailbox.fail(error)

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(
            f"the engine at {self.control.target} could not be reached for "
            f"{self._window_s:g} s: {self._last_error}"
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _identity(info: ModelInfo) -> tuple[object, ...]:
    """What must not change under a request that goes on."""
    return info.architecture, info.vocab_size, info.tokenizer_sha256, info.tasks, info.pooling
