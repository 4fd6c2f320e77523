"""One live request's tokens on their way to its consumer: bounded, coalescing, cancellation-proof.

A list and a future rather than a queue: under load one wake-up carries all that came, and a
consumer cancelled in the middle of waiting loses nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes
from pagewire_frontend.engine_client.base import PastSequence, TokenDelta

# What may wait for a consumer that takes nothing, and for how long more may come then. Its client
# does not read; a consumer that does takes all of it within moments.
MAX_BACKLOG_BYTES = 64 << 20
BACKLOG_GRACE_S = 1.0
# As measured: a token in a list, and a TokenLogprob with its numbers.
_TOKEN_BYTES = 36
_LOGPROB_BYTES = 160


class BacklogError(Exception):
    """The consumer does not take what has come, and it is too much to keep."""


class MissingTokensError(Exception):
    """A run of tokens starts beyond what has come: the wire broke its promise."""


class SequenceRecord:
    """What has come of one sequence: enough to go on from it in another engine.

    Attributes:
        token_ids: its output so far.
        cumulative_logprob: of the output so far, where log probabilities are asked for.
        finish_reason: set when it ended, in the engine or by a stop string here.
    """

    __slots__ = ("cumulative_logprob", "finish_reason", "token_ids")

    def __init__(self, past: PastSequence | None = None) -> None:
        self.token_ids: list[int] = [] if past is None else list(past.token_ids)
        self.cumulative_logprob = 0.0 if past is None else past.cumulative_logprob
        self.finish_reason = None if past is None else past.finish_reason


class Mailbox:
    """Collects deltas from the wire and hands them to one consumer. One event loop owns it.

    Memory is bounded by what the request may produce, and by `max_backlog_bytes`.

    Args:
        num_sequences: n of the request.
        on_end: called once, when nothing more is expected.
        whole: keep everything from the consumer until the end, so that the request can be started
            over elsewhere at any time before.
        past: what the sequences had produced before, which the consumer knows.
        max_backlog_bytes: what may wait for a consumer that takes nothing; None: anything.

    Attributes:
        sequences: what has come, by index.
        error: what ended the request, if it failed.
        num_tokens: tokens of all sequences so far.
        progressed: set with each wake-up, for whoever watches over a resubmission.
    """

    def __init__(
        self,
        num_sequences: int,
        on_end: Callable[[], None],
        *,
        whole: bool = False,
        past: Sequence[PastSequence] = (),
        max_backlog_bytes: int | None = None,
    ) -> None:
        self._past = past
        self._max_backlog_bytes = None if whole else max_backlog_bytes
        self._backlog_bytes = 0
        self._too_much_since = float("inf")
        self.sequences = _records(num_sequences, past)
        self.error: PagewireError | None = None
        self.num_tokens = 0
        self.progressed: asyncio.Event | None = None
        self.whole = whole
        self._on_end = on_end
        self._open = sum(record.finish_reason is None for record in self.sequences)
        self._pending: dict[int, TokenDelta] = {}
        self._next_prompt_position = 1
        self._on_hold = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more is expected: all sequences ended, or the request failed."""
        return self._open == 0 or self.error is not None

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return self._open

    @property
    def has_something(self) -> bool:
        """Whether anything has come of the request."""
        return (
            self.num_tokens > 0
            or self._next_prompt_position > 1
            or any(record.finish_reason is not None for record in self.sequences)
        )

    def add_tokens(
        self,
        index: int,
        start: int,
        token_ids: list[int],
        logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Takes a run of tokens; what has come before is dropped by its index.

        Raises:
            MissingTokensError: tokens before `start` have not come.
            BacklogError: nothing is taken, and too much waits.
        """
        record = self.sequences[index]
        if record.finish_reason is not None or self.error is not None:
            return
        have = len(record.token_ids)
        if start != have:
            if start > have:
                raise MissingTokensError(f"sequence {index}: tokens {have} to {start} are missing")
            if start + len(token_ids) <= have:
                return
            token_ids = token_ids[have - start :]
            logprobs = logprobs[have - start :]
        record.token_ids += token_ids
        self.num_tokens += len(token_ids)
        delta = self._delta(index, have)
        delta.token_ids += token_ids
        if logprobs:
            delta.logprobs += logprobs
            record.cumulative_logprob += sum(position.token.logprob for position in logprobs)
        if self._max_backlog_bytes is not None:
            self._weigh(self._max_backlog_bytes, len(token_ids), logprobs)

    def _weigh(self, limit: int, num_tokens: int, logprobs: Sequence[PositionLogprobs]) -> None:
        self._backlog_bytes += _TOKEN_BYTES * num_tokens
        if logprobs:
            self._backlog_bytes += _LOGPROB_BYTES * len(logprobs) * (1 + len(logprobs[0].top))
        if self._backlog_bytes > limit:
            now = time.monotonic()
            self._too_much_since = min(self._too_much_since, now)
            if now - self._too_much_since > BACKLOG_GRACE_S:
                raise BacklogError(f"{self._backlog_bytes >> 20} MiB")

    def add_start(self, index: int, times: RequestTimes) -> None:
        """Takes what is told with the request's first token, just after that was taken."""
        delta = self._pending.get(index)
        if delta is not None and delta.times is None:
            delta.times = times

    def add_prompt_logprobs(self, start: int, positions: list[PositionLogprobs]) -> None:
        """Takes log probabilities of the prompt; repeated ones are dropped by their index."""
        known = self._next_prompt_position - start
        if known < 0:
            raise MissingTokensError(f"prompt positions before {start} are missing")
        fresh = positions[known:]
        if not fresh or self.ended:
            return
        delta = self._delta(0, len(self.sequences[0].token_ids))
        if not delta.prompt_logprobs:
            delta.prompt_logprobs_start = self._next_prompt_position
        delta.prompt_logprobs += fresh
        self._next_prompt_position += len(fresh)

    def finish(
        self,
        index: int,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        num_tokens: int | None = None,
        cumulative_logprob: float = 0.0,
        times: RequestTimes | None = None,
        vector: list[float] | None = None,
    ) -> None:
        """Takes the end of a sequence, with what pooling made of it.

        Raises:
            MissingTokensError: fewer than `num_tokens` tokens have come.
        """
        record = self.sequences[index]
        if record.finish_reason is not None or self.error is not None:
            return
        have = len(record.token_ids)
        if num_tokens is not None and have < num_tokens:
            raise MissingTokensError(f"sequence {index} ended at {num_tokens}, {have} have come")
        delta = self._delta(index, have)
        record.finish_reason = delta.finish_reason = reason
        delta.stop_token_id = stop_token_id
        delta.cumulative_logprob = cumulative_logprob
        delta.times = times
        delta.vector = vector
        self._close_one()

    def fail(self, error: PagewireError) -> None:
        """The request ended with an error; what came before it is still delivered."""
        if not self.ended:
            self.error = error
            self._on_end()
            self.wake()

    def hold(self) -> None:
        """Keeps what has come from the consumer until `wake`: more is about to come."""
        self._on_hold = True

    def wake(self) -> None:
        """Lets the consumer go on."""
        self._on_hold = False
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.progressed is not None:
            self.progressed.set()

    def mute(self, index: int, reason: FinishReason) -> None:
        """The consumer needs no more of this sequence; what waits of it is dropped."""
        record = self.sequences[index]
        self._pending.pop(index, None)
        if record.finish_reason is None:
            record.finish_reason = reason
            if self.error is None:
                self._close_one()
                self.wake()

    def mute_all(self, reason: FinishReason) -> None:
        """The consumer needs nothing more of the request."""
        for index in range(len(self.sequences)):
            self.mute(index, reason)

    def restart(self) -> None:
        """Forgets all that came: nothing of it has been delivered, and its seed is not known."""
        self.sequences = _records(len(self.sequences), self._past)
        self.num_tokens = 0
        self._open = sum(record.finish_reason is None for record in self.sequences)
        self._pending = {}
        self._next_prompt_position = 1

    async def take(self) -> list[TokenDelta]:
        """All deltas since the last call, one a sequence; waits for the first. Empty at the end.

        Raises:
            PagewireError: the request failed; raised after what came before was taken.
        """
        while self._on_hold or not self._pending or (self.whole and not self.ended):
            if not self._on_hold:
                if self.error is not None:
                    raise self.error
                if self._open == 0:
                    return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, {}
        self._backlog_bytes = 0
        self._too_much_since = float("inf")
        return list(pending.values())

    def _close_one(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._on_end()

    def _delta(self, index: int, start: int) -> TokenDelta:
        delta = self._pending.get(index)
        if delta is None:
            delta = TokenDelta(sequence_index=index, start=start, token_ids=[])
            self._pending[index] = delta
        return delta


def _records(num_sequences: int, past: Sequence[PastSequence]) -> list[SequenceRecord]:
    if past:
        return [SequenceRecord(one) for one in past]
    return [SequenceRecord() for _ in range(num_sequences)]
