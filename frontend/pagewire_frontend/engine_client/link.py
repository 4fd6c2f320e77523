"""The link to one engine: keeps a session connected, through the engine's deaths."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import zmq

from pagewire.delta_frames import FrameCounts
from pagewire.errors import PagewireError
from pagewire.v1 import engine_pb2, token_deltas_pb2
from pagewire_frontend.engine_client.base import ModelInfo
from pagewire_frontend.engine_client.control import ControlChannel, TransportError
from pagewire_frontend.engine_client.model_identity import ReplicaIdentity
from pagewire_frontend.engine_client.session import Loss, WireSession
from pagewire_frontend.engine_client.vacancy import Vacancy

if TYPE_CHECKING:
    from pagewire_frontend.engine_client.live_request import LiveRequest

_logger = logging.getLogger(__name__)

_RECONNECT_TIMEOUT_S = 3.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 1.0
_DETACH_TIMEOUT_S = 2.0
# A connection that was only cut is back sooner; after this its requests go to replicas.
_AWAY_AFTER_S = 0.5
_DUPLICATE_RETRY_S = 5.0


class LinkState(Enum):
    """Of one engine, as this frontend sees it."""

    READY = "ready"
    AWAY = "away"
    STUCK = "stuck"
    DRAINING = "draining"
    RETIRED = "retired"  # its address is none of the engines' any more
    OTHER_MODEL = "other_model"
    DUPLICATE = "duplicate"  # another address of an engine that is linked already


class LinkEvents(Protocol):
    """Who is told of a link's life. All calls come from the event loop."""

    async def prepare(self, link: EngineLink, info: ModelInfo) -> None:
        """The engine is about to get requests: it must have its adapters first.

        Raises:
            TransportError: it did not answer.
        """
        ...

    def on_connected(self, link: EngineLink, replaced: WireSession | None) -> None:
        """Requests can be submitted; those of `replaced` were lost with it."""
        ...

    def on_lost(self, link: EngineLink) -> None:
        """The connection has ended."""
        ...

    def on_changed(self, link: EngineLink) -> None:
        """It is away for longer than a cut lasts, or stuck, or drains, or no longer so."""
        ...

    def on_vacant(self, link: EngineLink) -> None:
        """The engine is rid of what was told to leave it."""
        ...

    def on_failure(self, link: EngineLink, number: int, error: PagewireError) -> None:
        """A request failed in the engine."""
        ...


class EngineLink:
    """One engine, through its deaths.

    Args:
        name: what logs and metrics call it: HOST:PORT.
        open_channel: opens a channel to its control API.
        events: told what becomes of it.
        frames: where what becomes of the delta wire's frames is counted.

    Attributes:
        control: its control API.
        session: the present one; it may be disconnected.
        model_info: what it served when it was last connected.
        identity: of that.
        lives: requests that were submitted to it, by their stream's number.
        own_load: of those requests.
        adapters: versions of those that it has, by name; where there are several engines.
        away: whether it is disconnected for longer than a cut lasts.
        died: whether it went away without saying so.
        lost_at: when it went away, seconds of the monotonic clock; inf while it is connected.
        draining, retired: whether new requests must go elsewhere.
        wanted: the identity that it must have to be sent requests; None: any.
        num_routed: requests that were submitted to it.
        fault: why what answers can't be served from; set before it was ever connected.
        vacancy: whether the present session is rid of what was told to leave it.
        closed: whether it is given up for good.
    """

    def __init__(
        self,
        name: str,
        open_channel: Callable[[], ControlChannel],
        events: LinkEvents,
        frames: FrameCounts | None = None,
    ) -> None:
        self.name = name
        self.control = open_channel()
        self.session: WireSession | None = None
        self.model_info: ModelInfo | None = None
        self.identity: ReplicaIdentity | None = None
        self.lives: dict[int, LiveRequest] = {}
        self.own_load = 0.0
        self.adapters: dict[str, str] = {}
        self.away = True
        self.died = False
        self.lost_at = time.monotonic()
        self.draining = False
        self.retired = False
        self.duplicate = False
        self.wanted: ReplicaIdentity | None = None
        self.num_routed = 0
        self.fault: PagewireError | None = None
        self.vacancy = Vacancy()
        self.closed = False
        self.last_error = "it has not been reached yet"
        self.stopped_epoch = 0
        self._open_channel = open_channel
        self._events = events
        self._frames = frames
        # The process's own, and never terminated: a client that was dropped without being closed
        # would hang the collector in the termination of a context of its own.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._connected = False
        self._was_stuck = False
        self._waiting = 0
        self._others = 0
        self._abandoned: WireSession | None = None
        self._away_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether its session has a connection."""
        session = self.session
        return self._connected and session is not None and session.connected

    @property
    def state(self) -> LinkState:
        """What becomes of requests for it."""
        session = self.session
        if self.duplicate:
            return LinkState.DUPLICATE
        if not self.connected or session is None:
            return LinkState.AWAY
        if session.stuck:
            return LinkState.STUCK
        if self.draining:
            return LinkState.DRAINING
        if self.retired:
            return LinkState.RETIRED
        wanted = self.wanted
        if wanted is not None and wanted is not self.identity and wanted != self.identity:
            return LinkState.OTHER_MODEL
        return LinkState.READY

    @property
    def answering(self) -> bool:
        """Whether what it has gets on, and is told; whether or not it takes more."""
        return self.connected and self.session is not None and not self.session.stuck

    @property
    def usable(self) -> bool:
        """Whether a request submitted now would be taken up at once."""
        return self.state is LinkState.READY

    @property
    def load(self) -> float:
        """Requests that the engine has: ours as they are now, those of other frontends as it told
        last. One that waits counts twice: the engine has no place for more."""
        return self.own_load + self._others + self._waiting

    def start(self) -> None:
        """Connects, and stays connected until `close`."""
        self._task = asyncio.create_task(self._run(), name="engine-link")

    async def close(self) -> None:
        """Ends the session, which aborts what it still runs, and disconnects."""
        self.closed = True
        try:
            if self.session is not None and self.connected:
                await self._detach(self.session)
        finally:
            self._connected = False
            self._cancel_away_timer()
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait((self._task,))
            # Before the channel: a descriptor must leave the event loop before it is closed.
            if self.session is not None:
                self.session.disconnect()
            await self.control.close()

    def abandon_session(self) -> None:
        """Its requests have gone elsewhere: whatever still runs of them is to end as soon as the
        engine answers, and calls that it has not answered are given up."""
        if self._abandoned is None:
            self._abandoned = self.session
        if self.session is not None:
            self.session.give_up("its requests have gone to replicas")
        self._replace_channel()

    def note_draining(self) -> None:
        """The engine has refused a request since it drains."""
        if not self.draining:
            self.draining = True
            _logger.info("the engine at %s drains", self.name)
            self._events.on_changed(self)

    def renew_channel(self) -> None:
        """Calls by a new connection where certificates were renewed; what is under way by the old
        one fails with TransportError. Files that can't be read just now change nothing."""
        if not self.control.outdated:
            return
        try:
            self._replace_channel()
        except (OSError, PagewireError) as error:
            _logger.error("the engine's certificates can't be renewed: %s", error)

    def _replace_channel(self) -> None:
        control, self.control = self.control, self._open_channel()
        closing = asyncio.create_task(control.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _run(self) -> None:
        while True:
            await self._reconnect()
            session = self.session
            assert session is not None
            # Not the future itself: our cancellation would be its result.
            await asyncio.wait((session.lost,))
            self._on_loss(session, session.lost.result())

    async def _reconnect(self) -> None:
        delay = MIN_RETRY_S
        while True:
            pause = delay
            try:
                await self._connect()
                return
            except _DuplicateError:
                pause = _DUPLICATE_RETRY_S
                if self.session is not None:
                    await self._detach(self.session)
            except PagewireError as error:
                self.last_error = error.message
                if self.identity is None and not isinstance(error, TransportError):
                    self.fault = error
                self._be_away()
            except Exception:
                _logger.exception("connecting to the engine at %s failed", self.name)
                self._be_away()
            await asyncio.sleep(pause)
            delay = min(2 * delay, MAX_RETRY_S)

    def _on_loss(self, session: WireSession, loss: Loss) -> None:
        _logger.warning("lost the engine at %s: %s", self.name, loss.reason)
        self.last_error = loss.reason
        self._connected = False
        session.disconnect()
        self.died = not loss.on_purpose
        if loss.on_purpose:
            self.stopped_epoch = session.epoch
        self.lost_at = time.monotonic()
        self._others = self._waiting = 0
        self._events.on_lost(self)
        if loss.on_purpose:
            self._be_away()
        elif not self.away:
            loop = asyncio.get_running_loop()
            self._away_timer = loop.call_later(_AWAY_AFTER_S, self._be_away)

    def _be_away(self) -> None:
        """What it had need not wait for it any longer."""
        self._cancel_away_timer()
        if not self.away:
            self.away = True
            self._events.on_changed(self)

    def _cancel_away_timer(self) -> None:
        if self._away_timer is not None:
            self._away_timer.cancel()
            self._away_timer = None

    async def _connect(self) -> None:
        """One attempt to take our session over, or else to open another."""
        self.renew_channel()
        if self._abandoned is not None:
            await self._detach(self._abandoned)
        old = None if self._abandoned is not None else self.session
        attached = await self.control.attach(
            old.session_id if old else "",
            old.secret if old else "",
            timeout_s=_RECONNECT_TIMEOUT_S,
        )
        if old is not None and attached.resumed and attached.epoch == old.epoch:
            await old.connect(attached)
            _logger.info("the engine's session goes on: %s", self.name)
            self._be_connected(attached, None)
            return
        info = await self.control.model_info()
        if info.epoch != attached.epoch:
            raise TransportError("the engine restarted while we attached")
        await self._events.prepare(self, info)
        session = WireSession(
            attached,
            self.control.host,
            self._context,
            self._on_failure,
            self._frames,
            self._on_heartbeat,
        )
        await session.connect(attached)
        self.vacancy = Vacancy()
        if self.session is not None and self.session.epoch == session.epoch:
            session.presume_stuck(self.session.stuck)
            # What the old session had is told to leave, too, and may be in the step under way.
            self.vacancy.begin()
            self.vacancy.told()
        replaced, self.session, self._abandoned = self.session, session, None
        self.model_info, self.identity = info, ReplicaIdentity.of(info)
        self._be_connected(attached, replaced)

    def _be_connected(
        self, attached: engine_pb2.AttachResponse, replaced: WireSession | None
    ) -> None:
        self._connected, self.away, self.died, self.fault = True, False, False, None
        self._cancel_away_timer()
        self.draining = attached.draining
        self._was_stuck = self.session is not None and self.session.stuck
        self.lost_at = float("inf")
        self._events.on_connected(self, replaced)
        if self.duplicate:
            self._connected = False
            if self.session is not None:
                self.session.disconnect()
                self._abandoned = self.session
            raise _DuplicateError

    async def _detach(self, session: WireSession) -> None:
        """Best effort: a session that is not ended is buried by the engine after its silence."""
        try:
            await self.control.detach(
                session.session_id, session.secret, timeout_s=_DETACH_TIMEOUT_S
            )
        except PagewireError as error:
            _logger.debug("the engine at %s did not hear our farewell: %s", self.name, error)

    def _on_heartbeat(self, beat: token_deltas_pb2.Heartbeat) -> None:
        vacant = self.vacancy.beat(beat.step, beat.busy)
        self._waiting = beat.num_waiting
        self._others = max(0, beat.num_running + beat.num_waiting - len(self.lives))
        stuck = self.session is not None and self.session.stuck
        if stuck != self._was_stuck or beat.draining != self.draining:
            self._was_stuck, self.draining = stuck, beat.draining
            self._events.on_changed(self)
        if vacant:
            self._events.on_vacant(self)

    def _on_failure(self, number: int, error: PagewireError) -> None:
        self._events.on_failure(self, number, error)


class _DuplicateError(Exception):
    """The engine is linked already, by another address of it."""
