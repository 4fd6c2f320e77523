"""The engine: requests in, tokens out, one step at a time.

A step reads top-down in `Engine.step`. Nothing here knows of sockets or tensors, and of threads
only that a step may be computed on another (see `plan_runner`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pagewire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    PagewireError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.beam_search import Hypothesis
from pagewire_engine.block_map import Snapshot, take_snapshot
from pagewire_engine.executor.base import Executor, PendingStep
from pagewire_engine.outputs import (
    PromptLogprobsOutput,
    RequestFailure,
    SequenceOutput,
    StepOutputs,
)
from pagewire_engine.plan_runner import PlanRunner, SkippedError
from pagewire_engine.queues import SchedulerSettings
from pagewire_engine.request import Request, Sequence
from pagewire_engine.schedule import Schedule
from pagewire_engine.scheduler import Scheduler
from pagewire_engine.start_rate import StartRate
from pagewire_engine.stats import EngineCounters, EngineStats
from pagewire_engine.step import Candidates, PromptLogprobsChunk, SampledToken, StepResult
from pagewire_engine.submission import Submission

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way: what it computes, since when, and where its result comes, if steps
    overlap."""

    schedule: Schedule
    at: float
    pending: PendingStep | None


class Engine:
    """Runs requests to their end. Not thread-safe: one thread calls it (see EngineLoop).

    Args:
        executor: runs the steps.
        eos_token_ids: the model's end-of-sequence ids.
        settings: the scheduler's limits.
        overlaps_steps: whether a step is scheduled while the one before it is computed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        eos_token_ids: Collection[int],
        settings: SchedulerSettings,
        overlaps_steps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self._executor = executor
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = itertools.count()
        self._sequence_ids = itertools.count()
        self._seeds = itertools.count()
        self._counters = EngineCounters()
        self._start_rate = StartRate()
        self._last_schedule: Schedule | None = None
        self._outputs = StepOutputs(step=1)
        self._runner = PlanRunner(executor) if overlaps_steps else None
        self._under_way: _Launched | None = None
        self._last_landed = 0.0

    # -- requests come and go ----------------------------------------------------------------

    def add(self, submission: Submission) -> None:
        """Takes a request on. One that can never run here fails in the next step's outputs.

        Raises:
            AlreadyExistsError: a live request has this id.
        """
        if submission.request_id in self._requests:
            raise AlreadyExistsError(
                f"a live request has the id {submission.request_id!r}", field="request_id"
            )
        try:
            request = self._new_request(submission)
            if request.live:
                self.scheduler.add(request)
        except PagewireError as error:
            self._refuse(submission, error)
            return
        except Exception as error:
            logger.exception("Request %s could not be taken on.", submission.request_id)
            self._refuse(submission, InternalError(_failed(error)))
            return
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                self._tell_end(sequence)
        if not request.live:
            self._counters.num_requests_finished += 1
            return
        self._requests[request.request_id] = request
        self._sequences.update((sequence.sequence_id, sequence) for sequence in request.live)

    def abort(
        self,
        request_id: str,
        sequence_index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
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

    def reset_prefix_cache(self) -> int:
        """Lets no later request find the content of today's blocks, nor what running requests go on
        to compute from it. Returns how many blocks could have been found."""
        for request in (*self.scheduler.running, *self.scheduler.swapped):
            for sequence in request.live:
                sequence.publish_at = sys.maxsize
        return self.scheduler.blocks.reset_prefix_cache()

    def fail_all(self, error: PagewireError) -> int:
        """Fails every live request; returns how many there were."""
        requests = list(self._requests.values())
        for request in requests:
            self._fail(request, error)
        return len(requests)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is live."""
        return request_id in self._requests

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        scheduler = self.scheduler
        queues = scheduler.running or scheduler.waiting or scheduler.swapped
        return bool(queues or self._outputs or self._under_way is not None)

    def stats(self) -> EngineStats:
        """A snapshot. Safe from any thread: each figure is read at once, not all at the same
        time."""
        counters, scheduler, blocks = self._counters, self.scheduler, self.scheduler.blocks
        return EngineStats(
            step=counters.step,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_swapped=len(scheduler.swapped),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_cpu_blocks=blocks.num_cpu_blocks,
            num_free_cpu_blocks=blocks.num_free_cpu_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            prefix_cache_queries=blocks.num_tokens_queried,
            prefix_cache_hits=blocks.num_tokens_hit,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_requests_finished=counters.num_requests_finished,
            num_requests_failed=counters.num_requests_failed,
            step_prefill_tokens=counters.step_prefill_tokens,
            step_decode_tokens=counters.step_decode_tokens,
            step_time_s=counters.step_time_s,
            num_prefill_chunks=counters.num_prefill_chunks,
            iteration_tokens=counters.iteration_tokens.snapshot(),
            step_time=counters.step_time.snapshot(),
            num_block_copies=scheduler.num_block_copies,
            num_beam_forks=counters.num_beam_forks,
        )

    def retry_after_s(self) -> float:
        """Seconds until one that finds the queue full should come again. Safe from any thread."""
        return self._start_rate.retry_after_s(len(self.scheduler.waiting), self._clock())

    def now(self) -> float:
        """The engine's clock, in seconds. Safe from any thread."""
        return self._clock()

    def snapshot(self) -> Snapshot:
        """Who holds which block, and what the last step computed whose results are there."""
        return take_snapshot(self.scheduler, self._last_schedule)

    def close(self) -> None:
        """Ends the thread that executes steps, after the one under way. Safe to call twice."""
        if self._runner is not None:
            self._runner.close()

    def _new_request(self, submission: Submission) -> Request:
        if not submission.prompt_token_ids:
            raise InvalidArgumentError("prompt_token_ids", "the prompt has no tokens")
        params = submission.sampling_params
        first_sequence_id = next(self._sequence_ids)
        for _ in range(params.n - 1):
            next(self._sequence_ids)
        return Request(
            submission,
            seed=self._draw_seed(submission.request_id) if params.seed is None else params.seed,
            arrival_number=next(self._arrivals),
            first_sequence_id=first_sequence_id,
            max_model_len=self.settings.max_model_len,
            eos_token_ids=self._eos_token_ids,
            now=self._clock() if submission.arrival is None else submission.arrival,
        )

    def _refuse(self, submission: Submission, error: PagewireError) -> None:
        self._outputs.failures.append(RequestFailure(submission.request_id, error))
        self._counters.num_requests_failed += 1

    def _draw_seed(self, request_id: str) -> int:
        """A seed for a request that came without one, the same in every run."""
        counted = f"{next(self._seeds)}:{request_id}".encode()
        return int.from_bytes(hashlib.blake2b(counted, digest_size=8).digest(), "big") >> 1

    # -- the step ----------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Schedules, executes and applies one step; tells what it produced, and what ended since
        the last one.

        Where steps overlap, it schedules a step and leaves it under way, and applies the one that
        was: the worker computes while this thread books, tells and schedules.

        Raises:
            UnavailableError: the executor has lost its workers; the engine can't go on.
        """
        if self._under_way is not None and self._must_land_first(self._under_way):
            self._land(self._under_way)
        before, self._under_way = self._under_way, self._launch()
        if before is not None:
            self._land(before)
        if self._under_way is not None and self._runner is None:
            self._land(self._under_way)
        return self.take_outputs()

    def _must_land_first(self, launched: _Launched) -> bool:
        """Whether nothing may be scheduled before a step's results are there."""
        has_failed = self._runner is not None and self._runner.has_failed
        return launched.schedule.lacks_blocks or has_failed

    def _launch(self) -> _Launched | None:
        """Schedules a step and lets it be executed. None where there is nothing to execute."""
        now = self._clock()
        self._counters.step += 1
        self._fail_overdue(now)
        schedule = self.scheduler.schedule(self._counters.step)
        for request, error in schedule.failures:
            self._fail(request, error)
        self._count_scheduled(schedule, now)
        if schedule.plan.is_empty:
            self._count_step_end(schedule, self._clock() - now)
            return None
        for sequence, entry in zip(schedule.sequences, schedule.plan.scheduled, strict=True):
            sequence.num_computed_tokens += entry.num_tokens
            if sequence.request.beam_search is not None:
                continue  # a beam's next token is chosen when all have been computed
            if entry.sample_for is sequence.itself:
                sequence.expect_token()
            else:
                for sequence_id in entry.sample_for:
                    self._sequences[sequence_id].expect_token()
        pending = None if self._runner is None else self._runner.launch(schedule.plan)
        self.scheduler.launched(schedule.plan.step)
        return _Launched(schedule, now, pending)

    def _land(self, launched: _Launched) -> None:
        """Waits for a step's results, and applies them."""
        if launched is self._under_way:
            self._under_way = None
        try:
            schedule, result = self._result(launched)
            started = max(launched.at, self._last_landed)
            self._apply(schedule, result, started)
        finally:
            self.scheduler.landed(launched.schedule.plan.step)
        self._last_landed = self._clock()
        self._count_step_end(schedule, self._last_landed - started)
        if self._runner is not None and self._under_way is None:
            self._runner.resume()

    def _count_step_end(self, schedule: Schedule, seconds: float) -> None:
        self._last_schedule = schedule
        prefills = schedule.plan.scheduled[schedule.num_decodes :]
        self._counters.count_step_end(
            prefill_tokens=sum(entry.num_tokens for entry in prefills),
            decode_tokens=schedule.num_decodes,
            seconds=seconds,
        )

    def take_outputs(self) -> StepOutputs:
        """What there is to tell, told once."""
        outputs, self._outputs = self._outputs, StepOutputs(step=self._counters.step + 1)
        return outputs

    def _result(self, launched: _Launched) -> tuple[Schedule, StepResult]:
        """What a step produced, and its schedule, less what has ended meanwhile if it was skipped.

        If it raised, its requests are tried in parts, so that only those at fault fail.
        """
        schedule = launched.schedule
        try:
            if launched.pending is not None:
                try:
                    return schedule, launched.pending.result()
                except SkippedError:
                    schedule = schedule.without_ended()
            return schedule, self._executor.execute(schedule.plan)
        except UnavailableError:
            raise  # the workers are gone, and that is no request's fault
        except Exception:
            logger.exception("Step %d failed; its requests are tried apart.", schedule.plan.step)
        result = StepResult(schedule.plan.step, sampled=[])
        self._execute_apart(schedule, schedule.requests(), result)
        return schedule, result

    def _execute_apart(
        self, schedule: Schedule, requests: list[Request], result: StepResult
    ) -> None:
        """Executes a part of a step that raised: in halves, until those at fault are alone."""
        middle = (len(requests) + 1) // 2
        for half in (requests[:middle], requests[middle:]):
            if not half:
                continue
            try:
                part = self._executor.execute(schedule.plan_of(half))
            except UnavailableError:
                raise
            except Exception as error:
                if len(half) > 1:
                    self._execute_apart(schedule, half, result)
                    continue
                logger.exception("Request %s failed.", half[0].request_id)
                self._fail(half[0], InternalError(_failed(error)))
                continue
            result.sampled.extend(part.sampled)
            result.prompt_logprobs.extend(part.prompt_logprobs)
            result.failed.extend(part.failed)
            result.candidates.extend(part.candidates)
            result.refused.extend(part.refused)

    def _apply(self, schedule: Schedule, result: StepResult, started: float) -> None:
        """Books what a step computed: tokens in the cache, prompt log probabilities, new tokens."""
        now = self._clock()
        _count_step(schedule, now - started)
        for sequence_id, why in result.failed:
            if sequence_id in self._sequences:
                request = self._sequences[sequence_id].request
                self._fail(request, InternalError(f"the model failed on this request: {why}"))
        for sequence_id, why in result.refused:
            if sequence_id in self._sequences:
                request = self._sequences[sequence_id].request
                self._fail(request, InvalidArgumentError("structured_output", why))
        for sequence, entry in zip(schedule.sequences, schedule.plan.scheduled, strict=True):
            num_computed_tokens = entry.start + entry.num_tokens
            if num_computed_tokens >= sequence.publish_at:
                self.scheduler.blocks.publish(sequence, num_computed_tokens)
        for sequence in schedule.prefills:
            self.scheduler.share_prompt(sequence.request)
        if result.prompt_logprobs:
            requests = {each.sequence_id: each.request for each in schedule.sequences}
            for chunk in result.prompt_logprobs:
                self._tell_prompt_logprobs(requests[chunk.sequence_id], chunk)
        for token in result.sampled:
            self._append_token(token, now)
        for candidates in result.candidates:
            self._advance_beams(candidates, now)

    def _fail_overdue(self, now: float) -> None:
        """Fails what has waited too long to start. DEADLINE_EXCEEDED and not UNAVAILABLE, for which
        a frontend would take the engine to be going, and submit the request again."""
        limit_s = self.settings.max_queue_time_s
        if limit_s is None:
            return
        waiting = self.scheduler.waiting
        while (request := waiting.oldest()) is not None and now - request.clock.arrival > limit_s:
            message = f"the request has waited for more than {limit_s:g} s and not been started"
            self._fail(request, DeadlineExceededError(f"{message}; try again later"))

    def _count_scheduled(self, schedule: Schedule, now: float) -> None:
        for sequence in schedule.prefills:
            clock = sequence.request.clock
            if clock.first_scheduled is None:
                clock.first_scheduled = now
                self._start_rate.count(now)
        self._counters.num_prefill_chunks += len(schedule.prefills)

    # -- what is booked and told -------------------------------------------------------------

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

    def _note_first_token(self, request: Request, now: float) -> bool:
        """Notes that a request's prompt is computed, if this is news. Returns whether it was."""
        if request.clock.first_token is not None:
            return False
        request.clock.first_token = now
        self._counters.num_prompt_tokens += request.num_prompt_tokens
        return True

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
        self.scheduler.change_beams(request, change)
        self._counters.num_beam_forks += len(change.forks)
        for beam in change.dropped:
            del self._sequences[beam.sequence_id]
        self._sequences.update((child.sequence_id, child) for _, child in change.forks)

    def _end_beam_search(self, request: Request, cut_off: FinishReason | None = None) -> None:
        """Ends a beam search and tells its n results; without tokens where it was cut off."""
        search, params = request.beam_search, request.sampling_params
        assert search is not None
        self.scheduler.remove(request)
        self._forget(request)
        self._counters.num_requests_finished += 1
        times = request.times(self._clock())
        results = search.hypotheses[: params.n]
        for index in range(params.n):
            if cut_off is not None or index >= len(results):
                result = Hypothesis([], 0.0, 0.0, cut_off or FinishReason.LENGTH, [])
            else:
                result = results[index]
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

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        sequence.finish_reason = reason
        self.scheduler.finish_sequence(sequence)
        del self._sequences[sequence.sequence_id]
        if not request.live:
            del self._requests[request.request_id]
            self._counters.num_requests_finished += 1

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

    def _fail(self, request: Request, error: PagewireError) -> None:
        """Ends a whole request with an error. A request fails once."""
        if self._requests.get(request.request_id) is not request:
            return
        self.scheduler.remove(request, discard=True)
        for sequence in request.live:
            sequence.finish_reason = FinishReason.ERROR
        self._forget(request)
        self._outputs.failures.append(RequestFailure(request.request_id, error))
        self._counters.num_requests_failed += 1

    def _forget(self, request: Request) -> None:
        for sequence in request.live:
            del self._sequences[sequence.sequence_id]
        request.live.clear()
        del self._requests[request.request_id]


def _count_step(schedule: Schedule, seconds: float) -> None:
    """Counts a step for each request it computed; the sequences of one stand side by side."""
    counted = None
    for sequence in schedule.sequences:
        if sequence.request is not counted:
            counted = sequence.request
            counted.clock.count_step(seconds)


def _failed(error: Exception) -> str:
    """What a client is told of a fault of ours: its kind, but nothing of its inside."""
    return f"the engine failed on this request ({type(error).__name__}); its log says more"
