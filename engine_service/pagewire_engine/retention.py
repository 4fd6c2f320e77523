"""What the engine keeps of a stream until the frontend has acknowledged it.

Each kind of output is a list of items with two marks: items before `first` are acknowledged and
gone, items before `cursor` have been sent. A rewind moves the cursor back to `first`. Pure state:
no sockets, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewire.conversion import fill_times
from pagewire.errors import PagewireError
from pagewire.outputs import PositionLogprobs, RequestTimes, TokenLogprob
from pagewire.v1 import sampling_pb2, token_deltas_pb2
from pagewire_engine.outputs import PromptLogprobsOutput, SequenceOutput

MAX_FRAME_BYTES = 1 << 18
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 16
_VECTOR_VALUE_BYTES = 4


class FrameColumns:
    """The columns of one StepDeltas under construction.

    Plain lists: filling a repeated field from a list of ints runs in C, one append at a time
    does not.

    Attributes:
        room: estimated bytes left; once it is used up, the rest waits for the next frame.
        deferred: something waits for what must come before it.
    """

    __slots__ = (
        "count",
        "deferred",
        "message",
        "room",
        "sequence",
        "start",
        "stream",
        "token_id",
    )

    def __init__(self, message: token_deltas_pb2.StepDeltas) -> None:
        self.message = message
        self.stream: list[int] = []
        self.sequence: list[int] = []
        self.start: list[int] = []
        self.count: list[int] = []
        self.token_id: list[int] = []
        self.room = MAX_FRAME_BYTES
        self.deferred = False

    def reserve(self, count: int, cost: int) -> int:
        """Takes room for up to `count` items of `cost` bytes each.

        Returns:
            How many there was room for, at least one. Fewer than asked: the frame is full.
        """
        self.room -= count * cost
        if self.room >= 0:
            return count
        return max(1, (self.room + count * cost) // cost)

    def finish(self) -> None:
        """Moves the columns into the message."""
        message = self.message
        message.stream.extend(self.stream)
        if any(self.sequence):
            message.sequence.extend(self.sequence)
        message.start.extend(self.start)
        message.count.extend(self.count)
        message.token_id.extend(self.token_id)


class Retained(Protocol):
    """Something owed to the frontend."""

    def write(self, frame: FrameColumns) -> int:
        """Puts what lies beyond the cursor into the frame, as far as its room goes, and moves the
        cursor. Returns the cursor."""
        ...

    @property
    def pending(self) -> bool:
        """Whether anything lies beyond the cursor."""
        ...

    def confirm(self, position: int) -> bool:
        """Forgets items before `position`. Returns whether this was the last of it."""
        ...

    def rewind(self) -> None:
        """Moves the cursor back to what was acknowledged."""
        ...


class SequenceLog:
    """One sequence's tokens, log probabilities and end, with which a vector may come. The end
    counts as an item after the last token.

    Args:
        stream: the session's number for the request.
        sequence: index within the request.
        first: tokens the frontend has already, from an earlier life of the request.
        before: what must have been sent before: who reads a token takes the prompt's log
            probabilities to be whole.
    """

    __slots__ = (
        "before",
        "cursor",
        "end",
        "first",
        "logprobs",
        "sequence",
        "start",
        "start_times",
        "stream",
        "tokens",
    )

    def __init__(
        self, stream: int, sequence: int, first: int, before: Sequence[Retained] = ()
    ) -> None:
        self.before = before
        self.stream = stream
        self.sequence = sequence
        self.first = first
        self.cursor = first
        self.tokens: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.end: SequenceOutput | None = None
        # Where the request's first token is, if it is this sequence's, and what is told with it.
        self.start = 0
        self.start_times: RequestTimes | None = None

    def record(self, output: SequenceOutput) -> None:
        """Takes over what a step produced.

        Raises:
            ValueError: the tokens do not follow those before.
        """
        if output.token_ids:
            expected = self.first + len(self.tokens)
            if output.start != expected or self.end is not None:
                raise ValueError(
                    f"tokens of sequence {self.sequence} start at {output.start}, not {expected}"
                )
            self.tokens += output.token_ids
            if output.logprobs:
                self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.end = self.end or output
        elif output.times is not None:
            self.start, self.start_times = output.start, output.times

    @property
    def pending(self) -> bool:
        stop = self.first + len(self.tokens)
        return self.cursor < stop or (self.cursor == stop and self.end is not None)

    def write(self, frame: FrameColumns) -> int:
        if any(item.pending for item in self.before):
            frame.deferred = True
            return self.cursor
        done = self.cursor - self.first
        count = len(self.tokens) - done
        if count > 0:
            cost = _TOKEN_BYTES
            if self.logprobs:
                cost += _logprob_bytes(self.logprobs[0])
            count = frame.reserve(count, cost)
            frame.stream.append(self.stream)
            frame.sequence.append(self.sequence)
            frame.start.append(self.cursor)
            frame.count.append(count)
            if done == 0 and count == len(self.tokens):
                frame.token_id += self.tokens
            else:
                frame.token_id += self.tokens[done : done + count]
            if self.start_times is not None and self.cursor <= self.start:
                started = frame.message.started.add(stream=self.stream, sequence=self.sequence)
                fill_times(started.times, self.start_times)
            if self.logprobs:
                entry = frame.message.logprobs.add(
                    stream=self.stream, sequence=self.sequence, start=self.cursor
                )
                for position in self.logprobs[done : done + count]:
                    fill_position(entry.positions.add(), position)
            self.cursor += count
        if self.end is not None and self.cursor == self.first + len(self.tokens):
            self._write_end(frame, self.end)
            self.cursor += 1
        return self.cursor

    def _write_end(self, frame: FrameColumns, end: SequenceOutput) -> None:
        entry = frame.message.finished.add(
            stream=self.stream,
            sequence=self.sequence,
            reason=int(end.finish_reason or 0),
            num_tokens=self.cursor,
            cumulative_logprob=end.cumulative_logprob,
        )
        if end.stop_token_id is not None:
            entry.stop_token_id = end.stop_token_id
        if end.times is not None:
            fill_times(entry.times, end.times)
        if end.vector is not None:
            frame.message.vectors.add(stream=self.stream, sequence=self.sequence, values=end.vector)
            frame.room -= _VECTOR_VALUE_BYTES * len(end.vector)
        frame.room -= 64

    def confirm(self, position: int) -> bool:
        done = min(position - self.first, len(self.tokens))
        if done > 0:
            del self.tokens[:done]
            del self.logprobs[:done]
            self.first += done
        return self.end is not None and position > self.first + len(self.tokens)

    def rewind(self) -> None:
        self.cursor = self.first


class PromptLog:
    """Log probabilities of a prompt; the first position told is 1."""

    __slots__ = ("cursor", "first", "positions", "stream")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.first = 1
        self.cursor = 1
        self.positions: list[PositionLogprobs] = []

    def record(self, output: PromptLogprobsOutput) -> None:
        """Takes over what a step told; a prompt computed again repeats nothing."""
        known = self.first + len(self.positions)
        self.positions += output.positions[max(0, known - output.start) :]

    @property
    def pending(self) -> bool:
        return self.cursor < self.first + len(self.positions)

    def write(self, frame: FrameColumns) -> int:
        done = self.cursor - self.first
        cost = _logprob_bytes(self.positions[done])
        count = frame.reserve(len(self.positions) - done, cost)
        entry = frame.message.prompt_logprobs.add(stream=self.stream, start=self.cursor)
        for position in self.positions[done : done + count]:
            fill_position(entry.positions.add(), position)
        self.cursor += count
        return self.cursor

    def confirm(self, position: int) -> bool:
        done = position - self.first
        if done > 0:
            del self.positions[:done]
            self.first = position
        return False

    def rewind(self) -> None:
        self.cursor = self.first


class FailureNote:
    """The error that ended a whole request: one item.

    Args:
        stream: the session's number for the request.
        error: what went wrong.
        before: what must have been sent before it.
    """

    __slots__ = ("before", "error", "sent", "stream")

    def __init__(self, stream: int, error: PagewireError, before: Sequence[Retained]) -> None:
        self.stream = stream
        self.error = error
        self.before = before
        self.sent = False

    @property
    def pending(self) -> bool:
        return not self.sent

    def write(self, frame: FrameColumns) -> int:
        if any(item.pending for item in self.before):
            frame.deferred = True
            return 0
        error = self.error
        frame.message.failed.add(
            stream=self.stream,
            code=int(error.code),
            message=error.message,
            field=error.field,
            retry_after_s=error.retry_after_s,
        )
        frame.room -= 64 + len(error.message)
        self.sent = True
        return 1

    def confirm(self, position: int) -> bool:
        return position > 0

    def rewind(self) -> None:
        self.sent = False


def fill_position(message: sampling_pb2.PositionLogprobs, position: PositionLogprobs) -> None:
    """Writes one position's log probabilities into its message."""
    _fill_token(message.token, position.token)
    for token in position.top:
        _fill_token(message.top.add(), token)


def _fill_token(message: sampling_pb2.TokenLogprob, token: TokenLogprob) -> None:
    message.token_id = token.token_id
    message.logprob = token.logprob
    message.rank = token.rank


def _logprob_bytes(position: PositionLogprobs) -> int:
    return _LOGPROB_BYTES * (1 + len(position.top))
