"""One session with an engine: the delta wire's frontend end.

All of it runs in callbacks of the event loop that owns the socket, without awaits between reading
a frame and having delivered it: no cancellation can fall in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from pagewire.delta_frames import DamagedFrameError, Dropped, FrameCounts, seal, unseal
from pagewire.errors import PagewireError
from pagewire.limited_log import LimitedLog
from pagewire.v1 import engine_pb2, token_deltas_pb2
from pagewire_frontend.engine_client.control import TransportError
from pagewire_frontend.engine_client.delivery import deliver
from pagewire_frontend.engine_client.frame_order import FrameOrder, Verdict
from pagewire_frontend.engine_client.mailbox import Mailbox
from pagewire_frontend.engine_client.wakeups import Wakeups

logger = logging.getLogger(__name__)
_damaged = LimitedLog(logger)

HELLO_TIMEOUT_S = 3.0
SILENCE_S = 5.0
STUCK_AFTER_S = 30.0
# Frames that the engine sends ahead.
_WINDOW = 8
# Half of them: it never waits for an acknowledgement that waits for more frames.
_ACK_EVERY = 4
_ACK_DELAY_S = 0.01
_COMPLAIN_INTERVAL_S = 0.2
_WATCH_INTERVAL_S = 0.25
_NOBLOCK = int(zmq.NOBLOCK)  # as an enum it is slow
_FRAMES_A_TURN = 64
_RESEND_HELLO_S = 0.5
# The engine's have 256 KiB and one item more: a position's log probabilities, or a vector.
_MAX_ENGINE_FRAME = 16 << 20


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a connection ended.

    Attributes:
        reason: for the log.
        on_purpose: the engine said goodbye because it stops: nobody's request is to blame.
    """

    reason: str
    on_purpose: bool = False


class WireSession:
    """A session, which may outlive several connections.

    Args:
        attached: the engine's answer to Attach.
        host: that the control channel reached, for endpoints of any host.
        context: for the sockets.
        on_failure: told the stream number and the error of a request that failed in the engine.
        frames: where what becomes of frames is counted.
        on_heartbeat: told each heartbeat.

    Attributes:
        streams: where each live stream's tokens go, by stream number.
        lost: done when the present connection has ended.
    """

    def __init__(
        self,
        attached: engine_pb2.AttachResponse,
        host: str,
        context: zmq.Context[zmq.Socket[bytes]],
        on_failure: Callable[[int, PagewireError], None],
        frames: FrameCounts | None = None,
        on_heartbeat: Callable[[token_deltas_pb2.Heartbeat], None] = lambda beat: None,
    ) -> None:
        self.session_id = attached.session_id
        self.secret = attached.secret
        self.epoch = attached.epoch
        self.streams: dict[int, Mailbox] = {}
        self.lost: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self._host = host
        self._on_failure = on_failure
        self._frames = frames or FrameCounts()
        self._on_heartbeat = on_heartbeat
        self._numbers = itertools.count(1)
        self._connections = itertools.count(1)
        self._order = FrameOrder()
        self._wakeups = Wakeups()
        self._acknowledged = 0
        self._heartbeat_s = attached.heartbeat_interval_ms / 1000
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._greeted: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._last_heard = 0.0
        self._last_ack = 0.0
        self._last_complaint = 0.0
        self._stuck = False
        self._burst = 0

    @property
    def connected(self) -> bool:
        """Whether Hello was answered and the connection has not ended since."""
        return self._watcher is not None and not self.lost.done()

    @property
    def stuck(self) -> bool:
        """Whether the engine reports a step without progress for a long time."""
        return self._stuck

    @property
    def lagged(self) -> bool:
        """Whether the last that came may have been all that the engine was allowed to send ahead:
        it may have computed more."""
        return self._burst >= _WINDOW

    def give_up(self, reason: str) -> None:
        """The engine has said elsewhere that this connection or session is not known to it."""
        self._lose(Loss(reason))

    def presume_stuck(self, stuck: bool) -> None:
        """As an earlier session of the same life was told; until a heartbeat says otherwise."""
        self._stuck = stuck

    def next_number(self) -> int:
        """A stream number, never reused."""
        return next(self._numbers)

    async def connect(self, attached: engine_pb2.AttachResponse) -> None:
        """Opens a connection, in the place of an earlier one, and says Hello.

        Raises:
            TransportError: the endpoint can't be opened, or Hello was not answered.
        """
        self.disconnect()
        loop = asyncio.get_running_loop()
        self.lost = loop.create_future()
        self._greeted = loop.create_future()
        self._last_heard = time.monotonic()
        try:
            self._open_socket(attached)
            for _ in range(int(HELLO_TIMEOUT_S / _RESEND_HELLO_S)):
                self._send_hello()
                await asyncio.wait(
                    (self._greeted, self.lost),
                    timeout=_RESEND_HELLO_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._greeted.done() or self.lost.done():
                    break
            if not self._greeted.done() or self.lost.done():
                reason = self.lost.result().reason if self.lost.done() else "no answer to Hello"
                raise TransportError(f"the delta wire at {attached.stream_endpoint}: {reason}")
        except zmq.ZMQError as error:
            self.disconnect()
            raise TransportError(
                f"the delta wire at {attached.stream_endpoint} can't be opened: {error}"
            ) from None
        except BaseException:
            self.disconnect()
            raise
        self._watcher = loop.create_task(self._watch(), name="delta-wire-watch")

    def disconnect(self) -> None:
        """Closes the connection; the streams stay. Safe to call twice."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._take_the_rest()
        self._wakeups.flush()
        self._lose(Loss("closed here"))
        loop = asyncio.get_running_loop()
        for socket in (self._monitor, self._socket):
            if socket is not None:
                loop.remove_reader(_descriptor(socket))
        # Each by itself: opening may have failed between the two.
        if self._socket is not None:
            self._socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close(linger=0)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._monitor = None

    def _open_socket(self, attached: engine_pb2.AttachResponse) -> None:
        endpoint = attached.stream_endpoint.replace("tcp://*:", f"tcp://{self._host}:")
        socket = self._context.socket(zmq.DEALER)
        # A fresh identity for each connection: the engine tells the old one from the new. A finite
        # RCVHWM with heartbeats aborts this process on ipc (libzmq); the window bounds the queue.
        number = next(self._connections)
        socket.setsockopt(zmq.IDENTITY, f"{self.session_id}.{number}".encode())
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVBUF, 65536)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ENGINE_FRAME)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if attached.HasField("curve_server_key"):
            public, secret = zmq.curve_keypair()
            socket.curve_publickey, socket.curve_secretkey = public, secret
            socket.curve_serverkey = attached.curve_server_key
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        loop = asyncio.get_running_loop()
        loop.add_reader(_descriptor(socket), self._on_readable)
        loop.add_reader(_descriptor(self._monitor), self._on_monitor)
        # The descriptors tell of changes only: each must be read dry once before they do.
        self._on_readable()
        self._on_monitor()

    def _lose(self, loss: Loss) -> None:
        if not self.lost.done():
            self.lost.set_result(loss)

    def _on_monitor(self) -> None:
        if self._monitor is None:
            return
        try:
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                # The engine may have said goodbye, and why.
                self._take_the_rest()
                # libzmq would reconnect on its own, and lose frames in silence.
                self._lose(Loss("the connection was cut"))
        except zmq.Again:
            pass

    async def _watch(self) -> None:
        """Notices silence, and sends signs of life."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = time.monotonic()
            if now - before > 4 * _WATCH_INTERVAL_S:
                # This process did not run: what was sent meanwhile waits in the socket.
                self._last_heard = max(self._last_heard, now - SILENCE_S / 2)
            before = now
            self._on_readable()
            self._on_monitor()
            if now - self._last_heard > SILENCE_S:
                self._lose(Loss(f"the engine was silent for {SILENCE_S:.0f} s"))
            if now - self._last_ack > self._heartbeat_s / 2:
                self._send_ack()

    def _send(self, frame: token_deltas_pb2.FrontendFrame) -> None:
        socket = self._socket
        if socket is None:
            return
        try:
            socket.send(seal(frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(Loss(f"sending failed: {error}"))
            return
        # A send can swallow the file descriptor's edge for a frame that came meanwhile.
        if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._on_readable)

    def _send_hello(self) -> None:
        frame = token_deltas_pb2.FrontendFrame(session_id=self.session_id)
        frame.hello.session_id = self.session_id
        frame.hello.secret = self.secret
        frame.hello.epoch = self.epoch
        self._send(frame)

    def _send_ack(self, *, rewind: bool = False) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        frame = token_deltas_pb2.FrontendFrame(session_id=self.session_id)
        frame.ack.epoch = self.epoch
        frame.ack.frame = self._acknowledged = self._order.acknowledgeable
        frame.ack.rewind = rewind
        self._last_ack = time.monotonic()
        self._send(frame)

    def _acknowledge_soon(self) -> None:
        owed = self._order.acknowledgeable - self._acknowledged
        if owed >= _ACK_EVERY:
            self._send_ack()
        elif owed > 0 and self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(_ACK_DELAY_S, self._ack_late)

    def _ack_late(self) -> None:
        self._ack_timer = None
        self._send_ack()

    def _on_readable(self) -> None:
        for taken in range(_FRAMES_A_TURN):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                self._lose(Loss(f"receiving failed: {error}"))
                return
            self._burst = taken + 1
            self._take(data)
        else:
            asyncio.get_running_loop().call_soon(self._on_readable)
        self._acknowledge_soon()

    def _take_the_rest(self) -> None:
        """What had come before a connection ended is good: it need not be computed again."""
        while self._socket is not None:
            try:
                self._take(self._socket.recv(_NOBLOCK))
            except zmq.ZMQError:
                return
            except Exception:
                # The connection must end all the same, and be opened again.
                logger.exception("a frame of the delta wire could not be taken")
            self._burst += 1

    def _take(self, data: bytes) -> None:
        try:
            frame = unseal(token_deltas_pb2.EngineFrame(), data)
        except DamagedFrameError as error:
            self._frames.drop(Dropped.DAMAGED)
            _damaged.warning("dropped what is no frame on the delta wire: %s", error)
            return
        if frame.session_id != self.session_id:
            self._frames.drop(Dropped.OTHER_SESSION)
            return
        kind = frame.WhichOneof("frame")
        # An engine of another life says truly that our session is not known to it.
        if kind != "goodbye" and getattr(frame, kind).epoch != self.epoch:
            self._frames.drop(Dropped.OLD_EPOCH)
            return
        self._last_heard = time.monotonic()
        if kind == "deltas":
            self._take_deltas(frame.deltas)
        elif kind == "heartbeat":
            beat = frame.heartbeat
            self._stuck = beat.busy and beat.step_age_ms > STUCK_AFTER_S * 1000
            self._on_heartbeat(beat)
        elif kind == "hello_reply":
            if self._greeted is not None and not self._greeted.done():
                self._greeted.set_result(None)
        else:
            goodbye = frame.goodbye
            self._lose(Loss(f"goodbye: {goodbye.reason}", goodbye.stopping))

    def _take_deltas(self, deltas: token_deltas_pb2.StepDeltas) -> None:
        verdict = self._order.admit(deltas.frame, deltas.base_frame)
        if verdict is Verdict.ACCEPT:
            self._wakeups.after_frame(*deliver(deltas, self.streams, self._on_failure))
        elif verdict is Verdict.DUPLICATE:
            self._frames.drop(Dropped.REPEATED)
        else:
            self._frames.drop(Dropped.OUT_OF_ORDER)
            now = time.monotonic()
            if now - self._last_complaint > _COMPLAIN_INTERVAL_S:
                self._last_complaint = now
                self._frames.rewind()
                self._send_ack(rewind=True)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
