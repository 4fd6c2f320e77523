"""The requests that live: what steps produce for them is booked here, and told.

Each ends here exactly once, with a finish reason for each sequence or with one error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import chain, islice, repeat

from pagewire.errors import InternalError, InvalidArgumentError, PagewireError
from pagewire.outputs import FinishReason
from pagewire_engine.beam_search import Hypothesis
from pagewire_engine.outputs import (
    PromptLogprobsOutput,
    RequestFailure,
    SequenceOutput,
    StepOutputs,
)
from pagewire_engine.queues import RequestQueues
from pagewire_engine.request import Request, RequestStatus, Sequence
from pagewire_engine.schedule import Schedule
from pagewire_engine.stats import EngineCounters
from pagewire_engine.step import (
    Candidates,
    PooledVector,
    PromptLogprobsChunk,
    SampledToken,
    StepResult,
)


class LiveRequests:
    """Every request between its admission and its end.

    Args:
        queues: told of what ends, and of beams that fork.
        counters: where requests and tokens are counted.
        sequence_ids: numbers for beams that fork.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        queues: RequestQueues,
        counters: EngineCounters,
        sequence_ids: itertools.count[int],
        clock: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._counters = counters
        self._sequence_ids = sequence_ids
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._outputs = StepOutputs(step=1)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def has_outputs(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._outputs)

    def take_outputs(self) -> StepOutputs:
        """What there is to tell, told once."""
        outputs, self._outputs = self._outputs, StepOutputs(step=self._counters.step + 1)
        return outputs

    def add(self, request: Request) -> None:
        """Takes a request on, and tells of those of its sequences that came with their end."""
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                self._tell_end(sequence)
        if not request.live:
            self._counters.num_requests_finished += 1
            self._queues.release_adapter(request.adapter)
            return
        self._requests[request.request_id] = request
        self._sequences.update((sequence.sequence_id, sequence) for sequence in request.live)

    def refuse(self, request_id: str, error: PagewireError) -> None:
        """Tells of a request that was not taken on."""
        self._outputs.failures.append(RequestFailure(request_id, error))
        self._counters.num_requests_failed += 1

    def abort(self, request_id: str, sequence_index: int | None, reason: FinishReason) -> None:
        """Ends a request, or one of its sequences. Unknown ids are no error."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.beam_search is not None:
            # The beams are not the request's results, of which nothing is told before its end.
            if sequence_index is None:
                self._end_beam_search(request, reason)
            return
        for sequence in list(request.live):
            if sequence_index is None or sequence.index == sequence_index:
                self._end(sequence, reason)
                self._tell_end(sequence)

    def fail(self, request: Request, error: PagewireError) -> None:
        """Ends a whole request with an error. A request fails once."""
        if self._requests.get(request.request_id) is not request:
            return
        self._queues.remove(request, discard=True)
        for sequence in request.live:
            sequence.finish_reason = FinishReason.ERROR
        self._forget(request)
        self.refuse(request.request_id, error)

    def fail_all(self, error: PagewireError, adapter: int | None = None) -> int:
        """Fails every one, or every one of an adapter; returns how many there were."""
        requests = [
            request
            for request in self._requests.values()
            if adapter is None or request.adapter == adapter
        ]
        for request in requests:
            self.fail(request, error)
        return len(requests)

    def count_by_adapter(self) -> dict[int, tuple[int, int]]:
        """Running (or swapped) and waiting requests of each adapter. Safe from any thread."""
        counts: dict[int, tuple[int, int]] = {}
        for request in list(self._requests.values()):
            running, waiting = counts.get(request.adapter, (0, 0))
            waits = request.status is RequestStatus.WAITING
            counts[request.adapter] = (running + (not waits), waiting + waits)
        return counts

    def expect(self, schedule: Schedule) -> None:
        """Books that a step is going to compute its tokens: the next one builds on them."""
        for sequence, entry in zip(schedule.sequences, schedule.plan.scheduled, strict=True):
            sequence.num_computed_tokens += entry.num_tokens
            if sequence.request.beam_search is not None:
                continue  # a beam's next token is chosen when all have been computed
            if entry.sample_for is sequence.itself:
                sequence.expect_token()
            else:
                for sequence_id in entry.sample_for:
                    self._sequences[sequence_id].expect_token()

    def book_failures(self, result: StepResult) -> None:
        """Fails the requests whose numbers came out wrong, or whose constraint can't be kept."""
        for sequence_id, why in result.failed:
            if sequence_id in self._sequences:
                request = self._sequences[sequence_id].request
                self.fail(request, InternalError(f"the model failed on this request: {why}"))
        for sequence_id, why in result.refused:
            if sequence_id in self._sequences:
                request = self._sequences[sequence_id].request
                constraint = request.sampling_params.structured_output
                kind = "" if constraint is None else f".{constraint.kind}"
                self.fail(request, InvalidArgumentError(f"structured_output{kind}", why))

    def book(self, schedule: Schedule, result: StepResult, now: float) -> None:
        """Books what a step has produced for those that live: prompt log probabilities and tokens,
        which may be their last, or
        the vector that is their end."""
        if result.prompt_logprobs:
            requests = {each.sequence_id: each.request for each in schedule.sequences}
            for chunk in result.prompt_logprobs:
                self._tell_prompt_logprobs(requests[chunk.sequence_id], chunk)
        for token in result.sampled:
            self._append_token(token, now)
        for candidates in result.candidates:
            self._advance_beams(candidates, now)
        for vector in result.vectors:
            self._end_with_vector(vector, now)

    def _append_token(self, sampled: SampledToken, now: float) -> None:
        sequence = self._sequences.get(sampled.sequence_id)
        if sequence is None:
            return  # its request failed in this step
        request = sequence.request
        is_first = self._note_first_token(request, now)
        self._counters.num_generation_tokens += 1
        start = len(sequence.output_token_ids)
        sequence.append(sampled.token_id)
        reason, stop_token_id = request.stop_reason(sequence)
        token_ids = [sampled.token_id]
        if request.told_at_end:
            if reason is None:
                return
            start, token_ids = 0, sequence.output_token_ids
        # By position: names would cost a quarter of what is done for a token.
        told = SequenceOutput(request.request_id, sequence.index, start, token_ids)
        told.num_tokens = start + len(token_ids)
        if sampled.logprobs is not None:
            told.logprobs = [sampled.logprobs]
            sequence.cumulative_logprob += sampled.logprob
        told.cumulative_logprob = sequence.cumulative_logprob
        if reason is not None:
            told.finish_reason = reason
            told.stop_token_id = sequence.stop_token_id = stop_token_id
            self._end(sequence, reason)
        if is_first or reason is not None:
            told.times = request.times(now)
        self._outputs.sequences.append(told)

    def _end_with_vector(self, vector: PooledVector, now: float) -> None:
        sequence = self._sequences.get(vector.sequence_id)
        if sequence is None:
            return  # its request failed in this step
        request = sequence.request
        self._note_first_token(request, now)
        self._end(sequence, FinishReason.STOP)
        told = SequenceOutput(request.request_id, sequence.index, 0, [])
        told.finish_reason, told.times = FinishReason.STOP, request.times(now)
        told.vector = vector.values
        self._outputs.sequences.append(told)

    def _note_first_token(self, request: Request, now: float) -> bool:
        """Notes that a request's prompt is computed, if this is news. Returns whether it was."""
        if request.clock.first_token is not None:
            return False
        request.clock.first_token = now
        self._counters.num_prompt_tokens += request.num_prompt_tokens
        return True

    def _tell_prompt_logprobs(self, request: Request, chunk: PromptLogprobsChunk) -> None:
        """Passes on what is new of a prompt: that of a preempted request is computed twice, but
        told once."""
        if not request.live:
            return
        start = request.num_prompt_logprobs + 1
        positions = chunk.positions[start - chunk.start :]
        if not positions:
            return
        request.num_prompt_logprobs += len(positions)
        self._outputs.prompt_logprobs.append(
            PromptLogprobsOutput(request.request_id, start, positions)
        )

    def _advance_beams(self, candidates: Candidates, now: float) -> None:
        """Once all beams of a request have come to choose, lets its search choose."""
        sequence = self._sequences.get(candidates.sequence_id)
        if sequence is None:
            return  # its request failed in this step
        request, search = sequence.request, sequence.request.beam_search
        assert search is not None
        request.candidates[sequence.sequence_id] = candidates
        if len(request.candidates) < len(request.live):
            return
        self._note_first_token(request, now)
        told = [request.candidates[beam.sequence_id] for beam in request.live]
        continuations = search.advance(request.live, told)
        if search.done:
            self._end_beam_search(request)
            return
        change = request.continue_beams(continuations, self._sequence_ids)
        self._queues.change_beams(request, change)
        self._counters.num_beam_forks += len(change.forks)
        for beam in change.dropped:
            del self._sequences[beam.sequence_id]
        self._sequences.update((child.sequence_id, child) for _, child in change.forks)

    def _end_beam_search(self, request: Request, cut_off: FinishReason | None = None) -> None:
        """Ends a beam search and tells its n results; without tokens where it was cut off."""
        search, params = request.beam_search, request.sampling_params
        assert search is not None
        self._queues.remove(request)
        self._forget(request)
        self._counters.num_requests_finished += 1
        times = request.times(self._clock())
        found = [] if cut_off is not None else search.hypotheses[: params.n]
        none = Hypothesis([], 0.0, 0.0, cut_off or FinishReason.LENGTH, [])
        for index, result in enumerate(islice(chain(found, repeat(none)), params.n)):
            self._counters.num_generation_tokens += len(result.token_ids)
            self._outputs.sequences.append(
                SequenceOutput(
                    request_id=request.request_id,
                    sequence_index=index,
                    start=0,
                    token_ids=result.token_ids,
                    logprobs=result.logprobs if params.logprobs is not None else None,
                    finish_reason=result.finish_reason,
                    num_tokens=len(result.token_ids),
                    cumulative_logprob=result.cumulative_logprob,
                    times=times,
                )
            )

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        sequence.finish_reason = reason
        self._queues.finish_sequence(sequence)
        del self._sequences[sequence.sequence_id]
        if not request.live:
            del self._requests[request.request_id]
            self._counters.num_requests_finished += 1
            self._queues.release_adapter(request.adapter)

    def _tell_end(self, sequence: Sequence) -> None:
        """Tells of an end that no new token came with."""
        request = sequence.request
        num_tokens = len(sequence.output_token_ids)
        at_end = request.told_at_end
        self._outputs.sequences.append(
            SequenceOutput(
                request_id=request.request_id,
                sequence_index=sequence.index,
                start=0 if at_end else num_tokens,
                token_ids=sequence.output_token_ids if at_end else [],
                finish_reason=sequence.finish_reason,
                stop_token_id=sequence.stop_token_id,
                num_tokens=num_tokens,
                cumulative_logprob=sequence.cumulative_logprob,
                times=request.times(self._clock()),
            )
        )

    def _forget(self, request: Request) -> None:
        for sequence in request.live:
            del self._sequences[sequence.sequence_id]
        request.live.clear()
        del self._requests[request.request_id]
        self._queues.release_adapter(request.adapter)
