"""Sessions of the delta wire: what each frontend is owed, and which frames carry it.

Pure state with the time passed in: the socket lives in `token_stream`. One owner at a time; the
caller holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.delta_frames import Dropped, FrameCounts
from pagewire.errors import PagewireError
from pagewire.tracing import TraceHeaders
from pagewire.v1 import token_deltas_pb2
from pagewire_engine.outputs import PromptLogprobsOutput, SequenceOutput
from pagewire_engine.retention import (
    FailureNote,
    FrameColumns,
    PromptLog,
    Retained,
    SequenceLog,
)

WINDOW = 8
ACK_TIMEOUT_S = 1.0
MAX_ACK_TIMEOUT_S = 8.0
_MAX_USED_NUMBERS = 4096


class StreamNumbers:
    """Which stream numbers a session has used, in bounded memory.

    Concurrent Submits arrive out of order, so a plain high-water mark would refuse good numbers.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._used: set[int] = set()

    def use(self, number: int) -> bool:
        """Takes a number; False when it was used before."""
        if number <= self._floor or number in self._used:
            return False
        self._used.add(number)
        if len(self._used) > _MAX_USED_NUMBERS:
            # The gap has been open for thousands of requests: whoever left it will not come.
            self._floor = min(self._used) - 1
        while self._floor + 1 in self._used:
            self._floor += 1
            self._used.remove(self._floor)
        return True


class Stream:
    """One request as its session sees it.

    Attributes:
        session: whose.
        number: the frontend's number for it.
        request_id: the frontend's internal id.
        engine_id: what the engine calls it; never reused, so that the outputs of an aborted
            request and of its successor under the same id can't be mixed up.
        seed: the seed in force.
        adapter_version: that of its adapter, if it has one.
        live: whether the engine may still produce something for it.
        logs: one for each sequence that had not ended before, by index.
        prompt_logs: log probabilities of the prompt: none, or one log.
        trace_headers: of the trace that the request belongs to, where there are traces.
    """

    __slots__ = (
        "_open",
        "adapter_version",
        "engine_id",
        "failure",
        "live",
        "logs",
        "number",
        "prompt_logs",
        "request_id",
        "seed",
        "session",
        "trace_headers",
    )

    def __init__(
        self,
        session: Session,
        number: int,
        request_id: str,
        produced: Mapping[int, int],
        seed: int,
    ) -> None:
        self.session = session
        self.number = number
        self.request_id = request_id
        self.engine_id = f"{request_id}@{session.session_id[:12]}.{number}"
        self.seed = seed
        self.adapter_version = ""
        self.trace_headers: TraceHeaders = ()
        self.live = True
        self.prompt_logs: list[PromptLog] = []
        self.logs = {
            index: SequenceLog(number, index, first, self.prompt_logs)
            for index, first in produced.items()
        }
        self.failure: FailureNote | None = None
        self._open = len(self.logs)

    def close_sequence(self) -> bool:
        """Counts an ended sequence; True when it was the last."""
        self._open -= 1
        if self._open == 0:
            self.live = False
        return not self.live


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A frame that waits for its acknowledgement, and the position it moved each cursor to."""

    number: int
    positions: list[tuple[Retained, int]]


class Session:
    """One frontend: its streams, and the frames on their way to it.

    Attributes:
        session_id: public name.
        secret: proves a takeover.
        identity: ZeroMQ routing id of the connection that said Hello last; None while there is
            none.
        streams: by number, until all of a stream is acknowledged.
        last_heard: when the frontend last gave a sign of life, seconds.
    """

    def __init__(
        self,
        session_id: str,
        secret: str,
        epoch: int,
        now: float,
        frames: FrameCounts | None = None,
    ) -> None:
        self.session_id = session_id
        self.secret = secret
        self.identity: bytes | None = None
        self.streams: dict[int, Stream] = {}
        self.last_heard = now
        self._epoch = epoch
        self._frames = frames or FrameCounts()
        self._numbers = StreamNumbers()
        self._next_frame = 1
        self._base_frame = 1
        self._unacknowledged: deque[SentFrame] = deque()
        self._window = WINDOW
        self._ack_timeout_s = ACK_TIMEOUT_S
        self._overdue_at = float("inf")
        self._blocked_until = 0.0
        # Insertion order: who waited longest is written first.
        self._pending: dict[Retained, None] = {}
        self._owner: dict[Retained, Stream] = {}

    def use_number(self, number: int) -> bool:
        """Takes a stream number; False when the session used it before."""
        return self._numbers.use(number)

    def open_stream(
        self, number: int, request_id: str, produced: Mapping[int, int], seed: int
    ) -> Stream:
        """Starts to keep a stream's output.

        Args:
            number: from `use_number`.
            request_id: the frontend's internal id.
            produced: for each sequence that is to go on, the tokens the frontend has already.
            seed: the seed in force.
        """
        stream = Stream(self, number, request_id, produced, seed)
        self.streams[number] = stream
        for log in stream.logs.values():
            self._owner[log] = stream
        return stream

    def drop_stream(self, stream: Stream) -> None:
        """Forgets a stream, delivered or not."""
        if self.streams.pop(stream.number, None) is None:
            return
        stream.live = False
        kept: list[Retained] = [*stream.logs.values(), *stream.prompt_logs]
        if stream.failure is not None:
            kept.append(stream.failure)
        for item in kept:
            self._owner.pop(item, None)
            self._pending.pop(item, None)

    def record(self, stream: Stream, output: SequenceOutput) -> bool:
        """Keeps what a sequence produced; True when that ended the stream's last sequence."""
        log = stream.logs.get(output.sequence_index)
        if log is None:
            # It had ended in an earlier life of the request.
            return False
        ended_before = log.end is not None
        log.record(output)
        if log.pending:
            self._pending[log] = None
        return log.end is not None and not ended_before and stream.close_sequence()

    def record_prompt(self, stream: Stream, output: PromptLogprobsOutput) -> None:
        """Keeps log probabilities of a stream's prompt."""
        if not stream.prompt_logs:
            stream.prompt_logs.append(PromptLog(stream.number))
            self._owner[stream.prompt_logs[0]] = stream
        log = stream.prompt_logs[0]
        log.record(output)
        if log.pending:
            self._pending[log] = None

    def record_failure(self, stream: Stream, error: PagewireError) -> None:
        """Keeps the error that ended a stream."""
        stream.live = False
        if stream.failure is None:
            before: list[Retained] = [*stream.prompt_logs, *stream.logs.values()]
            stream.failure = FailureNote(stream.number, error, before)
            self._owner[stream.failure] = stream
            self._pending[stream.failure] = None

    def connect(self, identity: bytes, now: float) -> None:
        """A connection said Hello: whatever the last one was sent, this one starts from what was
        acknowledged."""
        self.identity = identity
        self.last_heard = now
        self._blocked_until = 0.0
        self._ack_timeout_s = ACK_TIMEOUT_S
        self._window = WINDOW
        self.rewind()

    def disconnect(self) -> None:
        """The connection is gone; the session waits for another Hello."""
        self.identity = None
        self.rewind()

    def can_send(self, now: float) -> bool:
        """Whether `take_frame` would give one."""
        return (
            bool(self._pending)
            and self.identity is not None
            and len(self._unacknowledged) < self._window
            and now >= self._blocked_until
        )

    def take_frame(self, step: int, now: float) -> token_deltas_pb2.EngineFrame:
        """The next frame, with all that is pending as far as one frame holds it.

        Only after `can_send`.
        """
        frame = token_deltas_pb2.EngineFrame(session_id=self.session_id)
        deltas = frame.deltas
        deltas.epoch = self._epoch
        deltas.frame = self._next_frame
        deltas.base_frame = self._base_frame
        deltas.step = step
        columns = FrameColumns(deltas)
        positions: list[tuple[Retained, int]] = []
        for item in self._pending:
            positions.append((item, item.write(columns)))
            if columns.room <= 0:
                break
        columns.finish()
        if columns.room > 0 and not columns.deferred:
            self._pending.clear()
        else:
            for item, _ in positions:
                del self._pending[item]
            # What did not fit goes behind those that have had nothing yet.
            self._pending.update((item, None) for item, _ in positions if item.pending)
        self._unacknowledged.append(SentFrame(self._next_frame, positions))
        self._next_frame += 1
        if len(self._unacknowledged) == 1:
            self._overdue_at = now + self._ack_timeout_s
        return frame

    def send_failed(self, retry_at: float) -> None:
        """The socket would not take the last frame: start over from what was acknowledged, not
        before `retry_at`."""
        self._blocked_until = retry_at
        self.rewind()

    def acknowledge(self, frame: int, now: float) -> None:
        """Every frame up to `frame` was accepted."""
        self.last_heard = now
        if frame >= self._next_frame:
            self._frames.drop(Dropped.UNSENT)
            return
        advanced = False
        while self._unacknowledged and self._unacknowledged[0].number <= frame:
            sent = self._unacknowledged.popleft()
            advanced = True
            for item, position in sent.positions:
                if item.confirm(position):
                    self._close(item)
        if advanced:
            self._window = WINDOW
            self._ack_timeout_s = ACK_TIMEOUT_S
            self._overdue_at = now + ACK_TIMEOUT_S if self._unacknowledged else float("inf")

    def complain(self, frame: int) -> None:
        """The frontend misses the frame after `frame`."""
        # A complaint from before the last rewind is answered by it already.
        if frame + 1 >= self._base_frame:
            self.rewind()

    def check_overdue(self, now: float) -> bool:
        """Rewinds when an acknowledgement is overdue; True when it did.

        Until one comes again, a single frame probes the connection, at growing intervals: a
        stopped frontend must not fill the socket's buffers with repetitions.
        """
        if now < self._overdue_at or self.identity is None:
            return False
        self.rewind()
        self._window = 1
        self._ack_timeout_s = min(2 * self._ack_timeout_s, MAX_ACK_TIMEOUT_S)
        return True

    def rewind(self) -> None:
        """Moves every cursor back to what was acknowledged."""
        if self._unacknowledged:
            self._frames.rewind()
        for sent in self._unacknowledged:
            for item, _ in sent.positions:
                item.rewind()
                if item.pending and item in self._owner:
                    self._pending[item] = None
        self._unacknowledged.clear()
        self._overdue_at = float("inf")
        self._base_frame = self._next_frame

    @property
    def num_unacknowledged(self) -> int:
        """Frames on their way."""
        return len(self._unacknowledged)

    def _close(self, item: Retained) -> None:
        """All of an item is acknowledged; with the last of a stream the stream goes too."""
        stream = self._owner.pop(item, None)
        if stream is None:
            return
        if isinstance(item, FailureNote) or not any(
            log in self._owner for log in stream.logs.values()
        ):
            self.drop_stream(stream)
