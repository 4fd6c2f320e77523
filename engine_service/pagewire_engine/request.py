"""A request and its sequences, as the scheduler sees them.

A request is its prompt plus the tokens it has produced so far; all else here can be dropped and
rebuilt, and that is what preemption by recompute does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes
from pagewire_engine.beam_search import BeamSearch, Continuation
from pagewire_engine.step import Candidates
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
        num_tokens: of prompt and output together, those in flight included.
        num_in_flight: tokens that steps under way will produce; the worker knows them first.
        num_computed_tokens: tokens of `prompt + output` whose keys and values are in the cache, or
            will be after the steps under way.
        num_blocks_told: leading entries of its block table that the worker knows.
        num_paid_tokens: tokens that were computed before it was preempted; its tenant is not
            charged for them again.
        block_keys: keys of its first full blocks (see prefix_cache), as far as they were needed.
        publish_at: computed tokens at which its next block is full and can be found by others.
        num_output_told: for a beam, tokens of the output that the worker knows; None: it does not
            know the beam.
        cumulative_logprob: sum over the output; 0 unless log probabilities were asked for.
        logprobs: for a beam, what is to be told of its tokens.
        finish_reason: set when it ended.
        stop_token_id: the stop token id that ended it, if one did.
    """

    __slots__ = (
        "block_keys",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "itself",
        "logprobs",
        "num_blocks_told",
        "num_computed_tokens",
        "num_in_flight",
        "num_output_told",
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
        self.itself = (sequence_id,)  # as StepPlan wants it, a step's decode being the common case
        self.index = index
        self.output_token_ids: list[int] = []
        self.num_tokens = request.num_prompt_tokens
        self.num_in_flight = 0
        self.num_computed_tokens = 0
        self.num_blocks_told = 0
        self.num_paid_tokens = 0
        self.block_keys: list[bytes] = []
        self.publish_at = sys.maxsize
        self.num_output_told: int | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None

    def expect_token(self) -> None:
        """A step under way will produce its next token."""
        self.num_in_flight += 1
        self.num_tokens += 1

    def append(self, token_id: int) -> None:
        """Adds a produced token, one that was expected if any is."""
        self.output_token_ids.append(token_id)
        if self.num_in_flight:
            self.num_in_flight -= 1
        else:
            self.num_tokens += 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt, num_prompt = self.request.prompt_token_ids, self.request.num_prompt_tokens
        if end <= num_prompt:
            return prompt[start:end]
        output = self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt]
        return prompt[start:] + output

    def fork(self, sequence_id: int) -> Sequence:
        """Another beam with the same past; its blocks are the block space manager's business."""
        child = Sequence(self.request, sequence_id, self.index)
        child.output_token_ids = list(self.output_token_ids)
        child.num_tokens = self.num_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.num_paid_tokens = self.num_paid_tokens
        child.cumulative_logprob = self.cumulative_logprob
        child.logprobs = list(self.logprobs)
        return child

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last produced token is computed."""
        num_prompt = self.request.num_prompt_tokens
        return self.num_computed_tokens == self.num_tokens - 1 >= num_prompt


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


class BeamChange(NamedTuple):
    """What a step of a beam search does to the beams.

    Attributes:
        forks: (parent, child): the child is to share the parent's blocks.
        dropped: beams that do not go on.
    """

    forks: list[tuple[Sequence, Sequence]]
    dropped: list[Sequence]


class Request:
    """A prompt and the n sequences that continue it.

    The prompt is computed once, by the leader; then the other sequences share its blocks. Until
    that is done the leader is scheduled alone.

    Attributes:
        order: sort key of the queues: (priority, number of arrival); lower runs first.
        tenant: whose fair share it counts on.
        account: what the tenant has been served; the waiting queue's from when it is put there.
        resubmission: admitted before, so that the queue's bounds do not apply.
        told_at_end: see Submission.
        seed: the request's seed, part of the random counter.
        max_num_tokens: longest a sequence may grow, prompt and output together.
        status: which queue holds it.
        live: sequences that have not ended, by index.
        is_prefilling: not all of its live sequences have come to decode one token a step.
        prompt_shared: the prompt is in the cache, and every live sequence holds its blocks.
        num_prompt_logprobs: prompt positions, from 1 on, whose log probabilities were told.
        adapter: the number of its LoRA; 0: none.
        cache_key: what besides tokens its blocks depend on; part of their keys.
        num_cached_tokens: prompt tokens that were in the prefix cache when it first started.
        beam_search: set where the request's sequences are beams; then its results are told at the
            end alone.
        grammar: see Submission.
        pooling: set where the answer is a vector; then it may grow by the one token that stands
            for it, which is expected but never computed.
        candidates: what the beams' next tokens are chosen from, by sequence id, until all beams
            have come to choose.
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
        self.told_at_end = submission.told_at_end
        self.max_num_tokens = max_model_len
        self.pooling = submission.pooling
        if self.pooling is not None:
            self.max_num_tokens = self.num_prompt_tokens + 1
        elif params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self._eos_token_ids = frozenset() if params.passes_eos else eos_token_ids
        self.beam_search = self._new_beam_search()
        num_sequences = params.n if self.beam_search is None else 1
        self.sequences = [Sequence(self, first_sequence_id + i, i) for i in range(num_sequences)]
        self.status = RequestStatus.WAITING
        self.is_prefilling = True
        self.prompt_shared = False
        self.num_prompt_logprobs = 0
        self.adapter = submission.adapter
        self.cache_key = submission.cache_key
        self.grammar = submission.grammar
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.clock = RequestClock(arrival=now)
        self.candidates: dict[int, Candidates] = {}
        if self.beam_search is None:
            self._restore_past(submission)
        self.live = [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def most_sequences(self) -> int:
        """Sequences it may come to run at a time."""
        if self.beam_search is not None:
            return self.beam_search.settings.beam_width
        return len(self.live)

    @property
    def fair_order(self) -> tuple[int, int, int]:
        """Sort key among tenants: priority, then what its tenant has been served, then arrival."""
        return (self.order[0], self.account.service, self.order[1])

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
    def is_recomputed(self) -> bool:
        """Whether it has not come back yet to where it was preempted."""
        return self.is_prefilling and self.num_preemptions > 0

    @property
    def leader_alone(self) -> bool:
        """Whether others wait for the leader to compute the prompt that they will share."""
        return len(self.live) > 1 and not self.prompt_shared

    def sampled_with(self, sequence: Sequence) -> tuple[int, ...]:
        """Ids of the sequences that take a token from the last row of a sequence's prefill."""
        if self.leader_alone:
            return tuple(s.sequence_id for s in self.live if not s.output_token_ids)
        return sequence.itself

    def stop_reason(self, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
        """Whether the last token of a sequence ends it: the reason, and the stop token id if
        one did."""
        output, params = sequence.output_token_ids, self.sampling_params
        token_id, num_tokens = output[-1], len(output)
        may_stop = num_tokens >= params.min_tokens
        if token_id in self._eos_token_ids and (may_stop or params.structured_output is not None):
            # A constraint allows it before min_tokens only where the text is complete.
            return FinishReason.STOP, None
        if may_stop and token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if self.num_prompt_tokens + num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def continue_beams(
        self, continuations: list[Continuation], new_sequence_ids: Iterator[int]
    ) -> BeamChange:
        """Gives the beams that go on their next token. The first that continues a beam takes its
        place, the others fork from it."""
        parents = self.live
        forks: list[tuple[Sequence, Sequence]] = []
        beams: list[Sequence] = []
        going_on: set[int] = set()
        for continuation in continuations:
            beam = parents[continuation.beam]
            if continuation.beam in going_on:
                child = beam.fork(next(new_sequence_ids))
                forks.append((beam, child))
                beam = child
            going_on.add(continuation.beam)
            beams.append(beam)
        dropped = [parent for index, parent in enumerate(parents) if index not in going_on]
        for beam, continuation in zip(beams, continuations, strict=True):
            beam.append(continuation.token_id)
            beam.cumulative_logprob = continuation.cumulative_logprob
            if continuation.logprobs is not None:
                beam.logprobs.append(continuation.logprobs)
        self.candidates.clear()
        self.sequences = list(beams)
        self.live = beams
        return BeamChange(forks, dropped)

    def _new_beam_search(self) -> BeamSearch | None:
        params = self.sampling_params
        if params.beam_search is None:
            return None
        return BeamSearch(
            params.beam_search,
            self.max_num_tokens - self.num_prompt_tokens,
            self._eos_token_ids,
            params.logprobs,
        )

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
