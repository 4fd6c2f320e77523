"""The delta wire's engine end: one thread owns the ROUTER socket.

The loop's thread only appends to the outbox and wakes this one. gRPC threads change sessions in the
table, under its lock.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from pagewire.delta_frames import DamagedFrameError, Dropped, FrameCounts, seal, unseal
from pagewire.descriptors import spare_descriptors
from pagewire.errors import PagewireError
from pagewire.limited_log import LimitedLog
from pagewire.outputs import RequestTimes
from pagewire.tracing import Tracing
from pagewire.v1 import token_deltas_pb2
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.session_table import SessionTable, has_secret
from pagewire_engine.sessions import Stream
from pagewire_engine.stream_endpoint import StreamEndpoint

logger = logging.getLogger(__name__)
_strangers = LimitedLog(logger)

HEARTBEAT_INTERVAL_S = 1.0
_RETRY_SEND_S = 0.05
_BUSY_POLL_MS = 50
# A turn comes at least twice a second; a longer gap means that this process was stopped.
_PAUSE_S = 2.0
_MAX_FRONTEND_FRAME = 1 << 16
# Taken in before anything is sent: a peer that floods the wire must not silence all others.
_FRAMES_A_TURN = 1024
# Kept free: libzmq aborts the process when it finds none for a connection that it accepts on ipc.
_LEAST_DESCRIPTORS = 16
_DESCRIPTORS_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """What heartbeats tell of the loop: step number, seconds since it last showed progress, whether
    a step is being computed, whether new requests are turned away, and how many it has."""

    step: int
    age_s: float
    busy: bool
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0


class TokenStreams:
    """The socket that carries every session's streams.

    Args:
        endpoint: where to bind.
        epoch: this life of the engine.
        abort: ends a request in the loop, by engine id; any thread.
        health: the loop's progress; any thread.
        session_timeout_s: a session silent for longer is dead.
        heartbeat_interval_s: between heartbeats.
        tracing: is told what requests went through; None: nobody asked for traces.

    Attributes:
        sessions: who is attached, and what they run.
        frames: what became of frames.
    """

    def __init__(
        self,
        endpoint: StreamEndpoint,
        epoch: int,
        abort: Callable[[str], None],
        health: Callable[[], LoopHealth],
        *,
        session_timeout_s: float = 30.0,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        tracing: Tracing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.epoch = epoch
        self.frames = FrameCounts()
        self._tracing = tracing
        self.sessions = SessionTable(epoch, session_timeout_s, abort, self.frames, self._trace_end)
        self.heartbeat_interval_s = heartbeat_interval_s
        self._health = health
        self._outbox: deque[StepOutputs] = deque()
        self._step = 0
        self._wake_reader, self._wake_writer = sockets.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._asleep = False
        self._stopping = False
        self._beat_now = False
        self._listening = True
        self._next_count = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._open_router()
        self._thread = threading.Thread(target=self._run, name="token-streams", daemon=True)

    # Called by any thread.

    def start(self) -> None:
        """Starts the thread; the socket is bound already."""
        self._thread.start()

    def stop(self) -> None:
        """Tells the frontends goodbye and frees the socket. Safe to call twice."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread.ident is None:
            self._close()
        else:
            self._wake()
            self._thread.join()

    def beat(self) -> None:
        """Sends heartbeats now: they have news."""
        self._beat_now = True
        self._wake()

    def publish(self, outputs: StepOutputs) -> None:
        """Hands over what a step produced; called by the loop's thread, never waits."""
        self._outbox.append(outputs)
        if self._asleep:
            self._wake()

    def resume(self, session_id: str) -> None:
        """Sends a session again what was not acknowledged.

        Raises:
            NotFoundError: no such session.
        """
        self.sessions.rewind(session_id)
        self._wake()

    # Called by the I/O thread only.

    def _trace_end(self, stream: Stream, times: RequestTimes | None, failure: str | None) -> None:
        if self._tracing is not None:
            told = times or RequestTimes()
            self._tracing.tell_times(stream.trace_headers, told, time.time_ns(), failure)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        next_heartbeat = last_turn = time.monotonic()
        timeout_ms = 0
        while not self._stopping:
            # The flag first, the outbox second: a publish in between wakes the poll.
            self._asleep = True
            poller.poll(0 if self._outbox else timeout_ms)
            self._asleep = False
            self._drain_wakes()
            now = time.monotonic()
            try:
                with self.sessions.lock:
                    if now - last_turn > _PAUSE_S:
                        self.sessions.forgive(now - last_turn)
                    last_turn = now
                    self._receive(now)
                    self._route_outbox()
                    self._send_frames(now)
                    if now >= next_heartbeat or self._beat_now:
                        self._beat_now = False
                        next_heartbeat = now + self.heartbeat_interval_s
                        self._send_heartbeats()
                        self.sessions.bury_the_silent(now)
                    if now >= self._next_count:
                        self._next_count = now + _DESCRIPTORS_INTERVAL_S
                        self._listen_while_there_are_descriptors()
                    timeout_ms = self._sleep_ms(now, next_heartbeat)
            except Exception:
                # Streams of every frontend hang on this thread; none may take it down.
                logger.exception("a turn of the delta wire failed")
                time.sleep(0.01)
        self._close()

    def _listen_while_there_are_descriptors(self) -> None:
        enough = spare_descriptors() > _LEAST_DESCRIPTORS
        if enough == self._listening:
            return
        if enough:
            self.endpoint.show()
            logger.warning("there are file descriptors again: the delta wire takes connections")
        else:
            self.endpoint.hide()
            logger.error(
                "this process may open %d more files: the delta wire takes no new connections "
                "until others have closed theirs; raise the limit (ulimit -n, LimitNOFILE)",
                spare_descriptors(),
            )
        self._listening = enough

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except (BlockingIOError, OSError):
            # Full: it is awake already. Closed: it has stopped.
            pass

    def _drain_wakes(self) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:
            pass

    def _sleep_ms(self, now: float, next_heartbeat: float) -> int:
        if any(s.num_unacknowledged or s.can_send(now) for s in self.sessions.all()):
            return _BUSY_POLL_MS
        return max(1, min(int((next_heartbeat - now) * 1000), 500))

    def _receive(self, now: float) -> None:
        """Takes in what waits: a send-only loop would not learn of cut connections."""
        for _ in range(_FRAMES_A_TURN):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                _strangers.warning("the delta wire could not receive: %s", error)
                return
            self._handle(parts, now)

    def _handle(self, parts: list[bytes], now: float) -> None:
        try:
            if len(parts) != 2:
                raise DamagedFrameError(f"{len(parts)} parts")
            frame = unseal(token_deltas_pb2.FrontendFrame(), parts[1])
        except DamagedFrameError as error:
            self.frames.drop(Dropped.DAMAGED)
            _strangers.warning("dropped what is no frame on the delta wire: %s", error)
            return
        if frame.HasField("hello"):
            self._greet(parts[0], frame.hello, now)
        else:
            self._take_ack(parts[0], frame, now)

    def _greet(self, identity: bytes, hello: token_deltas_pb2.Hello, now: float) -> None:
        session = self.sessions.by_id(hello.session_id)
        if hello.epoch != self.epoch:
            self._send_away(identity, hello.session_id, Dropped.OLD_EPOCH)
            return
        if session is None:
            self._send_away(identity, hello.session_id, Dropped.OTHER_SESSION)
            return
        if not has_secret(session, hello.secret):
            _strangers.warning("a Hello had the wrong secret")
            self.frames.drop(Dropped.REFUSED)
            self._send_goodbye(identity, hello.session_id, "wrong secret")
            return
        self.sessions.connect(session, identity, now)
        reply = token_deltas_pb2.EngineFrame(session_id=session.session_id)
        reply.hello_reply.session_id = session.session_id
        reply.hello_reply.epoch = self.epoch
        self._send(identity, seal(reply))

    def _take_ack(self, identity: bytes, frame: token_deltas_pb2.FrontendFrame, now: float) -> None:
        ack = frame.ack
        session = self.sessions.by_identity(identity)
        if ack.epoch != self.epoch:
            self._send_away(identity, frame.session_id, Dropped.OLD_EPOCH)
            return
        if session is None or session.session_id != frame.session_id:
            self._send_away(identity, frame.session_id, Dropped.OTHER_SESSION)
            return
        session.acknowledge(ack.frame, now)
        if ack.rewind:
            session.complain(ack.frame)

    def _send_away(self, identity: bytes, session_id: str, why: Dropped) -> None:
        """Drops a frame of a session that is not here. Who has said Hello here hears nothing of it:
        the frame had gone astray, and a goodbye would end what is well."""
        self.frames.drop(why)
        if self.sessions.by_identity(identity) is None:
            self._send_goodbye(identity, session_id, "no such session: attach again")

    def _route_outbox(self) -> None:
        while self._outbox:
            outputs = self._outbox.popleft()
            self._step = outputs.step
            self.sessions.route(outputs)

    def _send_frames(self, now: float) -> None:
        for session in self.sessions.all():
            session.check_overdue(now)
            while session.can_send(now):
                self._receive(now)
                if not session.can_send(now):
                    break
                frame = session.take_frame(self._step, now)
                if not self._send(session.identity or b"", seal(frame)):
                    session.send_failed(now + _RETRY_SEND_S)

    def _send_heartbeats(self) -> None:
        health = self._health()
        frame = token_deltas_pb2.EngineFrame()
        frame.heartbeat.epoch = self.epoch
        frame.heartbeat.step = health.step
        frame.heartbeat.step_age_ms = int(health.age_s * 1000)
        frame.heartbeat.busy = health.busy
        frame.heartbeat.draining = health.draining
        frame.heartbeat.num_running = health.num_running
        frame.heartbeat.num_waiting = health.num_waiting
        for session in self.sessions.all():
            if session.identity is not None:
                frame.session_id = session.session_id
                self._send(session.identity, seal(frame))

    def _send(self, identity: bytes, data: bytes) -> bool:
        try:
            self._router.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            # The peer is gone (EHOSTUNREACH): its session waits for another Hello.
            if not self.sessions.disconnect(identity) and error.errno != zmq.EHOSTUNREACH:
                _strangers.warning("the delta wire could not send: %s", error)
            return False
        return True

    def _send_goodbye(
        self, identity: bytes, session_id: str, reason: str, *, stopping: bool = False
    ) -> None:
        frame = token_deltas_pb2.EngineFrame(session_id=session_id)
        frame.goodbye.session_id = session_id
        frame.goodbye.epoch = self.epoch
        frame.goodbye.reason = reason
        frame.goodbye.stopping = stopping
        self._send(identity, seal(frame))

    def _open_router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        # MANDATORY: errors instead of silent drops. HANDOVER: a reconnecting peer replaces its
        # old connection. A finite RCVHWM with heartbeats aborts the peer's process on ipc.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.SNDHWM, 64)
        router.setsockopt(zmq.RCVHWM, 0)
        router.setsockopt(zmq.SNDBUF, 65536)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRONTEND_FRAME)
        try:
            self.endpoint.bind(router)
        except PagewireError:
            router.close()
            self._context.term()
            self.endpoint.close()
            raise
        return router

    def _close(self) -> None:
        with self.sessions.lock:
            # What ended in the last steps need not run again elsewhere.
            self._route_outbox()
            self._send_frames(time.monotonic())
            for session in self.sessions.all():
                if session.identity is not None:
                    self._send_goodbye(
                        session.identity, session.session_id, "the engine stops", stopping=True
                    )
        # A goodbye is a courtesy; a frontend that has stopped reading does not get to hold us.
        self._router.close(linger=200)
        self._context.term()
        self.endpoint.close()
        self._wake_reader.close()
        self._wake_writer.close()


def new_epoch() -> int:
    """A number no earlier life of any engine has had: the time, and random bits for engines that
    start together or with a clock set back."""
    return (time.time_ns() // 1_000_000 << 20) | int.from_bytes(os.urandom(3), "big") >> 4
