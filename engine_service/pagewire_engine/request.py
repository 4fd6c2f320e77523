"""A request and its sequences, as the scheduler sees them.

A request is its prompt plus the tokens it has produced so far; all else here can be dropped and
rebuilt, and that is what preemption by recompute does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, auto

from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason, RequestTimes
from pagewire_engine.submission import Submission
from pagewire_engine.tenant_accounts import TenantAccount


class RequestStatus(Enum):
    """Which queue holds a request."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


class Sequence:
    """One of a request's n outputs: `prompt + output`, of which a prefix is computed.

    Attributes:
        sequence_id: the engine's number for it, never reused.
        index: which of the request's n sequences.
        output_token_ids: what it has produced so far; grows by `append` alone.
        num_tokens: of prompt and output together.
        num_computed_tokens: tokens of `prompt + output` whose keys and values are in the cache.
        num_blocks_told: leading entries of its block table that the worker knows.
        num_paid_tokens: tokens that were computed before it was preempted; its tenant is not
            charged for them again.
        block_keys: keys of its first full blocks (see prefix_cache), as far as they were needed.
        publish_at: computed tokens at which its next block is full and can be found by others.
        cumulative_logprob: sum over the output; 0 unless log probabilities were asked for.
        finish_reason: set when it ended.
        stop_token_id: the stop token id that ended it, if one did.
    """

    __slots__ = (
        "block_keys",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "num_blocks_told",
        "num_computed_tokens",
        "num_paid_tokens",
        "num_tokens",
        "output_token_ids",
        "publish_at",
        "request",
        "sequence_id",
        "stop_token_id",
    )

    def __init__(self, request: Request, sequence_id: int, index: int) -> None:
        self.request = request
        self.sequence_id = sequence_id
        self.index = index
        self.output_token_ids: list[int] = []
        self.num_tokens = request.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_blocks_told = 0
        self.num_paid_tokens = 0
        self.block_keys: list[bytes] = []
        self.publish_at = sys.maxsize
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None

    def append(self, token_id: int) -> None:
        """Adds a produced token."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt, num_prompt = self.request.prompt_token_ids, self.request.num_prompt_tokens
        if end <= num_prompt:
            return prompt[start:end]
        output = self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt]
        return prompt[start:] + output

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last produced token is computed."""
        return self.num_computed_tokens == self.num_tokens - 1 and bool(self.output_token_ids)


@dataclass(slots=True)
class RequestClock:
    """When a request passed the stations of its life, in seconds of the engine's clock."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    num_steps: int = 0
    step_s: float = 0.0

    def count_step(self, seconds: float) -> None:
        """A step computed something of the request."""
        self.num_steps += 1
        self.step_s += seconds


class Request:
    """A prompt and the n sequences that continue it.

    The prompt is computed once, by the leader; then the other sequences share its blocks. Until
    that is done the leader is scheduled alone.

    Attributes:
        order: sort key of the queues: (priority, number of arrival); lower runs first.
        tenant: whose fair share it counts on.
        account: what the tenant has been served; the waiting queue's from when it is put there.
        resubmission: admitted before, so that the queue's bounds do not apply.
        seed: the request's seed, part of the random counter.
        max_num_tokens: longest a sequence may grow, prompt and output together.
        status: which queue holds it.
        live: sequences that have not ended, by index.
        is_prefilling: not all of its live sequences have come to decode one token a step.
        prompt_shared: the prompt is in the cache, and every live sequence holds its blocks.
        num_prompt_logprobs: prompt positions, from 1 on, whose log probabilities were told.
        cache_key: what besides tokens its blocks depend on; part of their keys.
        num_cached_tokens: prompt tokens that were in the prefix cache when it first started.
    """

    def __init__(
        self,
        submission: Submission,
        *,
        seed: int,
        arrival_number: int,
        first_sequence_id: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        now: float,
    ) -> None:
        params = submission.sampling_params
        self.request_id = submission.request_id
        self.prompt_token_ids = submission.prompt_token_ids
        self.num_prompt_tokens = len(submission.prompt_token_ids)
        self.sampling_params = params
        self.seed = seed
        self.order = (submission.priority, arrival_number)
        self.tenant = submission.tenant
        self.account = TenantAccount(submission.tenant)
        self.resubmission = submission.resubmission
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.sequences = [Sequence(self, first_sequence_id + i, i) for i in range(params.n)]
        self.status = RequestStatus.WAITING
        self.is_prefilling = True
        self.prompt_shared = False
        self.num_prompt_logprobs = 0
        self.cache_key = submission.cache_key
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.clock = RequestClock(arrival=now)
        self._restore_past(submission)
        self.live = [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt for all: one that waits for its first token."""
        return next((s for s in self.live if not s.output_token_ids), self.live[0])

    def times(self, now: float) -> RequestTimes:
        """What is told when the request has its first token, or a sequence ends, at `now`."""
        clock = self.clock
        scheduled = now if clock.first_scheduled is None else clock.first_scheduled
        token = now if clock.first_token is None else clock.first_token
        return RequestTimes(
            queue_s=scheduled - clock.arrival,
            prefill_s=token - scheduled,
            decode_s=now - token,
            cached_tokens=self.num_cached_tokens,
            preemptions=self.num_preemptions,
            steps=clock.num_steps,
            step_s=clock.step_s,
        )

    @property
    def may_skip_prompt(self) -> bool:
        """Whether cached blocks of the prompt need not be computed: log probabilities of a prompt
        come from computing it."""
        if self.sampling_params.prompt_logprobs is None:
            return True
        return self.num_prompt_logprobs >= self.num_prompt_tokens - 1

    @property
    def leader_alone(self) -> bool:
        """Whether others wait for the leader to compute the prompt that they will share."""
        return len(self.live) > 1 and not self.prompt_shared

    def sampled_with(self, sequence: Sequence) -> tuple[int, ...]:
        """Ids of the sequences that take a token from the last row of a sequence's prefill."""
        if self.leader_alone:
            return tuple(s.sequence_id for s in self.live if not s.output_token_ids)
        return (sequence.sequence_id,)

    def stop_reason(self, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
        """Whether the last token of a sequence ends it: the reason, and the stop token id if
        one did."""
        output, params = sequence.output_token_ids, self.sampling_params
        if len(output) >= params.min_tokens:
            if output[-1] in self._eos_token_ids:
                return FinishReason.STOP, None
            if output[-1] in params.stop_token_ids:
                return FinishReason.STOP, output[-1]
        if sequence.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _restore_past(self, submission: Submission) -> None:
        seen: set[int] = set()
        for past in submission.past:
            if not 0 <= past.index < len(self.sequences) or past.index in seen:
                raise InvalidArgumentError(
                    "past", f"sequence {past.index} is out of range or given twice"
                )
            seen.add(past.index)
            sequence = self.sequences[past.index]
            sequence.output_token_ids = list(past.output_token_ids)
            sequence.num_tokens += len(past.output_token_ids)
            sequence.cumulative_logprob = past.cumulative_logprob
            sequence.finish_reason = past.finish_reason
            if past.output_token_ids:
                # The last token may have ended it without anyone having been told.
                reason, stop_token_id = self.stop_reason(sequence)
                sequence.finish_reason = past.finish_reason or reason
                if sequence.finish_reason is FinishReason.STOP:
                    sequence.stop_token_id = stop_token_id
