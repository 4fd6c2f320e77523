"""All sessions of the delta wire, and where each request's outputs go.

gRPC threads come through the public methods, which take the lock. The I/O thread takes it for a
turn and uses what is marked so. The lock is never held across a wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from pagewire.delta_frames import FrameCounts
from pagewire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from pagewire.outputs import RequestTimes
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.sessions import Session, Stream

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1024


def _ignore(stream: Stream, times: RequestTimes | None, failure: str | None) -> None:
    """Nobody wants to know."""


class SessionTable:
    """Who is attached, and what they run.

    Args:
        epoch: this life of the engine.
        session_timeout_s: a session silent for longer is dead.
        abort: ends a request in the loop, by engine id; any thread.
        frames: where what becomes of frames is counted.
        on_end: is told of a request that has ended, its times and the kind of its failure, where
            there are any; the I/O thread, under the lock.

    Attributes:
        lock: held while anything here is read or changed.
    """

    def __init__(
        self,
        epoch: int,
        session_timeout_s: float,
        abort: Callable[[str], None],
        frames: FrameCounts | None = None,
        on_end: Callable[[Stream, RequestTimes | None, str | None], None] = _ignore,
    ) -> None:
        self.epoch = epoch
        self.session_timeout_s = session_timeout_s
        self.lock = threading.Lock()
        self._abort = abort
        self._frames = frames or FrameCounts()
        self._on_end = on_end
        self._sessions: dict[str, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        self._routes: dict[str, Stream] = {}
        self._live: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    # Called by gRPC's threads.

    def attach(self, session_id: str, secret: str) -> tuple[Session, bool]:
        """A new session, or the one asked for if it is still known.

        Returns:
            The session, and whether it was taken over.

        Raises:
            UnauthenticatedError: the secret is not the session's.
            ResourceExhaustedError: too many sessions.
        """
        now = time.monotonic()
        with self.lock:
            session = self._sessions.get(session_id) if session_id else None
            if session is not None:
                if not has_secret(session, secret):
                    raise UnauthenticatedError("this is not the session's secret", field="secret")
                session.last_heard = now
                return session, True
            if len(self._sessions) >= MAX_SESSIONS:
                raise ResourceExhaustedError(
                    f"{MAX_SESSIONS} frontends are attached",
                    retry_after_s=self.session_timeout_s,
                )
            session = Session(
                secrets.token_hex(16), secrets.token_hex(32), self.epoch, now, self._frames
            )
            self._sessions[session.session_id] = session
        logger.info("session %s attached", session.session_id[:12])
        return session, False

    def detach(self, session_id: str, secret: str) -> None:
        """Ends a session, if there is one, and aborts its requests.

        Raises:
            UnauthenticatedError: the secret is not the session's.
        """
        with self.lock:
            session = self._sessions.get(session_id)
            if session is None:
                return
            if not has_secret(session, secret):
                raise UnauthenticatedError("this is not the session's secret", field="secret")
            num_aborted = self._bury(session)
        logger.info("session %s detached: %d requests aborted", session_id[:12], num_aborted)

    def open_stream(
        self,
        session_id: str,
        number: int,
        request_id: str,
        produced: Mapping[int, int],
        seed: int,
    ) -> tuple[Stream, bool]:
        """Registers a stream before its request goes to the loop.

        Returns:
            The stream, and whether it is new (False: the same Submit came again).

        Raises:
            NotFoundError: no such session.
            FailedPreconditionError: the session's Hello has not come.
            AlreadyExistsError: a live request has this id.
            InvalidArgumentError: the stream number was used before.
        """
        with self.lock:
            session = self._heard(session_id)
            if session.identity is None:
                raise FailedPreconditionError(
                    "say Hello on the delta wire, and wait for its answer, before Submit",
                    field="session_id",
                )
            known = session.streams.get(number)
            if known is not None and known.request_id == request_id:
                return known, False
            live = self._live.get(request_id)
            if live is not None and live.live:
                raise AlreadyExistsError(
                    f"a live request has the id {request_id!r}", field="request_id"
                )
            if not session.use_number(number):
                raise InvalidArgumentError("stream", f"{number} was used before in this session")
            stream = session.open_stream(number, request_id, produced, seed)
            self._live[request_id] = stream
            self._routes[stream.engine_id] = stream
            return stream, True

    def withdraw(self, stream: Stream) -> None:
        """The loop did not take the request: nothing will come."""
        with self.lock:
            self._end(stream)
            stream.session.drop_stream(stream)

    def find(self, session_id: str, request_id: str, number: int | None = None) -> Stream | None:
        """The session's live stream of a request.

        Args:
            session_id: of the session.
            request_id: of the request.
            number: only the stream of this number; None: of any.

        Raises:
            NotFoundError: no such session.
        """
        with self.lock:
            return self._find(self._heard(session_id), request_id, number)

    def dismiss(self, session_id: str, request_id: str, number: int | None = None) -> Stream | None:
        """A request is to end: its id may be used again, and what it still says is kept. Where the
        stream of this number has not come yet, it is refused when it comes.

        Returns:
            The stream that runs, as `find` does.

        Raises:
            NotFoundError: no such session.
        """
        with self.lock:
            session = self._heard(session_id)
            stream = self._find(session, request_id, number)
            if stream is not None:
                del self._live[request_id]
            elif number:
                session.use_number(number)
            return stream

    def rewind(self, session_id: str) -> None:
        """Moves a session's streams back to what was acknowledged.

        Raises:
            NotFoundError: no such session.
        """
        with self.lock:
            self._heard(session_id).rewind()

    # Called by the I/O thread, which holds the lock.

    def all(self) -> Iterable[Session]:
        """Every session."""
        return self._sessions.values()

    def by_id(self, session_id: str) -> Session | None:
        """The session of an id."""
        return self._sessions.get(session_id)

    def by_identity(self, identity: bytes) -> Session | None:
        """The session whose connection has this ZeroMQ routing id."""
        return self._by_identity.get(identity)

    def connect(self, session: Session, identity: bytes, now: float) -> None:
        """A connection said a session's Hello; it takes the place of an earlier one."""
        if session.identity is not None and session.identity != identity:
            self._by_identity.pop(session.identity, None)
            logger.info("session %s reconnected", session.session_id[:12])
        session.connect(identity, now)
        self._by_identity[identity] = session

    def disconnect(self, identity: bytes) -> bool:
        """A connection is gone. Returns whether it was a session's."""
        session = self._by_identity.pop(identity, None)
        if session is None:
            return False
        logger.info("session %s lost its connection", session.session_id[:12])
        session.disconnect()
        return True

    def route(self, outputs: StepOutputs) -> None:
        """Gives a step's outputs to the streams they belong to."""
        routes = self._routes
        # First: a step may tell of a prompt and of the only token that comes after it.
        for prompt in outputs.prompt_logprobs:
            stream = routes.get(prompt.request_id)
            if stream is not None:
                stream.session.record_prompt(stream, prompt)
        for output in outputs.sequences:
            stream = routes.get(output.request_id)
            if stream is None:
                continue
            try:
                if stream.session.record(stream, output):
                    self._end(stream)
                    self._on_end(stream, output.times, None)
            except Exception as error:
                self._fail_broken(stream, error)
        for failure in outputs.failures:
            stream = routes.get(failure.request_id)
            if stream is not None:
                stream.session.record_failure(stream, failure.error)
                self._end(stream)
                self._on_end(stream, None, failure.error.code.name.lower())

    def forgive(self, seconds: float) -> None:
        """This process stood still: the frontends' silence meanwhile is its own."""
        for session in self._sessions.values():
            session.last_heard += seconds

    def bury_the_silent(self, now: float) -> None:
        """Ends sessions that were silent for too long, and aborts their requests."""
        for session in list(self._sessions.values()):
            silence = now - session.last_heard
            if silence <= self.session_timeout_s:
                continue
            num_aborted = self._bury(session)
            logger.warning(
                "session %s was silent for %.0f s: %d requests aborted",
                session.session_id[:12],
                silence,
                num_aborted,
            )

    def _bury(self, session: Session) -> int:
        """Forgets a session and aborts its requests. Returns how many."""
        live = [stream for stream in session.streams.values() if stream.live]
        del self._sessions[session.session_id]
        if session.identity is not None:
            self._by_identity.pop(session.identity, None)
        for stream in live:
            stream.live = False
            self._abort(stream.engine_id)
            self._end(stream)
        return len(live)

    def _find(self, session: Session, request_id: str, number: int | None) -> Stream | None:
        stream = self._live.get(request_id)
        if stream is None or stream.session is not session:
            return None
        return stream if number in (None, stream.number) else None

    def _heard(self, session_id: str) -> Session:
        """The session of a call, which is a sign of life."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(
                "no such session: it timed out or belongs to an earlier engine; attach again",
                field="session_id",
            )
        session.last_heard = time.monotonic()
        return session

    def _fail_broken(self, stream: Stream, error: Exception) -> None:
        """Outputs that do not fit together are our fault, and one request's problem."""
        logger.error("outputs of request %s do not fit: %s", stream.request_id, error)
        stream.session.record_failure(stream, InternalError("the engine lost count of its tokens"))
        self._end(stream)
        self._abort(stream.engine_id)

    def _end(self, stream: Stream) -> None:
        """Nothing more comes from the loop for this stream."""
        self._routes.pop(stream.engine_id, None)
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]


def has_secret(session: Session, secret: str) -> bool:
    """Whether a secret is the session's, in constant time."""
    return secrets.compare_digest(session.secret.encode(), secret.encode())
