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
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.adapters.turns import AdapterTurns
from pagewire_engine.block_map import Snapshot, take_snapshot
from pagewire_engine.executor.base import Executor, PendingStep
from pagewire_engine.fault_isolation import execute_apart
from pagewire_engine.live_requests import LiveRequests
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.plan_runner import PlanRunner, SkippedError
from pagewire_engine.queues import RequestQueues, SchedulerSettings
from pagewire_engine.request import Request
from pagewire_engine.schedule import Schedule
from pagewire_engine.scheduler import Scheduler
from pagewire_engine.start_rate import StartRate
from pagewire_engine.stats import EngineCounters, EngineStats, take_stats
from pagewire_engine.step import StepResult
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
        adapters: whose requests may run; None: no request may name one.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        eos_token_ids: Collection[int],
        settings: SchedulerSettings,
        overlaps_steps: bool = False,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterTurns | None = None,
    ) -> None:
        self.settings = settings
        self.queues = RequestQueues(settings, adapters)
        self.scheduler = Scheduler(self.queues)
        self._executor = executor
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._arrivals = itertools.count()
        self._sequence_ids = itertools.count()
        self._seeds = itertools.count()
        self._counters = EngineCounters()
        self._requests = LiveRequests(self.queues, self._counters, self._sequence_ids, clock)
        self._start_rate = StartRate()
        self._last_schedule: Schedule | None = None
        self._runner = PlanRunner(executor) if overlaps_steps else None
        self._under_way: _Launched | None = None
        self._last_landed = 0.0
        self._num_lost_blocks = 0

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
                self.queues.add(request)
        except PagewireError as error:
            self._refuse(submission, error)
            return
        except Exception as error:
            logger.exception("Request %s could not be taken on.", submission.request_id)
            self._refuse(submission, _failed(error))
            return
        self._requests.add(request)

    def abort(
        self,
        request_id: str,
        sequence_index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """Ends a request, or one of its sequences. Unknown ids are no error."""
        self._requests.abort(request_id, sequence_index, reason)

    def reset_prefix_cache(self) -> int:
        """Lets no later request find the content of today's blocks, nor what running requests go on
        to compute from it. Returns how many blocks could have been found."""
        for request in (*self.queues.running, *self.queues.swapped):
            for sequence in request.live:
                sequence.publish_at = sys.maxsize
        return self.queues.blocks.reset_prefix_cache()

    def fail_all(self, error: PagewireError, adapter: int | None = None) -> int:
        """Fails every live request, or every one of an adapter; returns how many there were."""
        if adapter is not None and self.queues.adapters is not None:
            self.queues.adapters.forget(adapter)
        return self._requests.fail_all(error, adapter)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is live."""
        return request_id in self._requests

    def _refuse(self, submission: Submission, error: PagewireError) -> None:
        self._requests.refuse(submission.request_id, error)
        self.queues.release_adapter(submission.adapter)

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

    def _draw_seed(self, request_id: str) -> int:
        """A seed for a request that came without one, the same in every run."""
        counted = f"{next(self._seeds)}:{request_id}".encode()
        return int.from_bytes(hashlib.blake2b(counted, digest_size=8).digest(), "big") >> 1

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        queues = self.queues
        requests = queues.running or queues.waiting or queues.swapped
        return bool(requests or self._requests.has_outputs or self._under_way is not None)

    @property
    def awaits_adapter(self) -> bool:
        """Whether `step` has nothing to do before an adapter's weights have come."""
        queues = self.queues
        if queues.adapters is None or queues.running or queues.swapped:
            return False
        if self._requests.has_outputs or self._under_way is not None:
            return False
        if queues.waiting.head(queues.adapters.may_start) is not None:
            return False
        return any(map(queues.adapters.awaits_weights, dict(queues.waiting.adapters())))

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

    def take_outputs(self) -> StepOutputs:
        """What there is to tell, told once."""
        return self._requests.take_outputs()

    def close(self) -> None:
        """Ends the thread that executes steps, after the one under way. Safe to call twice."""
        if self._runner is not None:
            self._runner.close()

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
            self._requests.fail(request, error)
        self._count_scheduled(schedule, now)
        if schedule.plan.is_empty:
            self._count_step_end(schedule, self._clock() - now)
            return None
        self._requests.expect(schedule)
        if self._under_way is not None:
            self._counters.num_overlapped_steps += 1
        pending = None if self._runner is None else self._runner.launch(schedule.plan)
        self.queues.launched(schedule.plan.step)
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
            self.queues.landed(launched.schedule.plan.step)
        self._last_landed = self._clock()
        self._count_step_end(schedule, self._last_landed - started)
        if self._runner is not None and self._under_way is None:
            self._runner.resume()

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
        except ResourceExhaustedError as no_memory:
            self._counters.num_steps_out_of_memory += 1
            logger.warning(
                "Step %d: %s. Its requests are tried apart.", schedule.plan.step, no_memory.message
            )
        except Exception:
            logger.exception("Step %d failed; its requests are tried apart.", schedule.plan.step)
        result, faults = execute_apart(self._executor, schedule)
        for request, error in faults:
            self._requests.fail(request, _failed(error))
        return schedule, result

    def _apply(self, schedule: Schedule, result: StepResult, started: float) -> None:
        """Books what a step computed: tokens in the cache, prompt log probabilities, new tokens."""
        now = self._clock()
        _count_step(schedule, now - started)
        self._requests.book_failures(result)
        for sequence, entry in zip(schedule.sequences, schedule.plan.scheduled, strict=True):
            num_computed_tokens = entry.start + entry.num_tokens
            if num_computed_tokens >= sequence.publish_at:
                self.queues.blocks.publish(sequence, num_computed_tokens)
        for sequence in schedule.prefills:
            self.queues.share_prompt(sequence.request)
        self._requests.book(schedule, result, now)

    def _fail_overdue(self, now: float) -> None:
        """Fails what has waited too long to start. DEADLINE_EXCEEDED and not UNAVAILABLE, for which
        a frontend would take the engine to be going, and submit the request again."""
        limit_s = self.settings.max_queue_time_s
        if limit_s is None:
            return
        waiting = self.queues.waiting
        while (request := waiting.oldest()) is not None and now - request.clock.arrival > limit_s:
            message = f"the request has waited for more than {limit_s:g} s and not been started"
            self._requests.fail(
                request,
                DeadlineExceededError(
                    f"{message}; try again later", retry_after_s=self.retry_after_s()
                ),
            )

    def stats(self) -> EngineStats:
        """Its figures. Safe from any thread."""
        return take_stats(self._counters, self.queues)

    def requests_by_adapter(self) -> dict[int, tuple[int, int]]:
        """Running (or swapped) and waiting requests of each adapter that has some. Safe from any
        thread."""
        return self._requests.count_by_adapter()

    def snapshot(self) -> Snapshot:
        """Who holds which block, and what the last step computed whose results are there."""
        return take_snapshot(self.queues, self._last_schedule)

    def check_at_rest(self) -> None:
        """Looks for blocks that are held though no request is left: a fault of ours, which is told
        in the log once for each loss."""
        blocks = self.queues.blocks
        num_lost = blocks.num_blocks - blocks.num_available_blocks
        num_lost += blocks.num_cpu_blocks - blocks.num_free_cpu_blocks
        if num_lost > self._num_lost_blocks:
            logger.error(
                "%d KV blocks are held though no request is left. What is served goes on being "
                "right, with less memory; restart the engine to have it back, and report this.",
                num_lost,
            )
        self._num_lost_blocks = num_lost

    def retry_after_s(self) -> float:
        """Seconds until one that finds the queue full should come again. Safe from any thread."""
        return self._start_rate.retry_after_s(len(self.queues.waiting), self._clock())

    def now(self) -> float:
        """The engine's clock, in seconds. Safe from any thread."""
        return self._clock()

    def _count_scheduled(self, schedule: Schedule, now: float) -> None:
        for sequence in schedule.prefills:
            clock = sequence.request.clock
            if clock.first_scheduled is None:
                clock.first_scheduled = now
                self._start_rate.count(now)
        self._counters.num_prefill_chunks += len(schedule.prefills)
        self._counters.num_block_copies += len(schedule.plan.block_copies)

    def _count_step_end(self, schedule: Schedule, seconds: float) -> None:
        self._last_schedule = schedule
        prefills = schedule.plan.scheduled[schedule.num_decodes :]
        self._counters.count_step_end(
            prefill_tokens=sum(entry.num_tokens for entry in prefills),
            decode_tokens=schedule.num_decodes,
            seconds=seconds,
        )


def _count_step(schedule: Schedule, seconds: float) -> None:
    """Counts a step for each request it computed; the sequences of one stand side by side."""
    counted = None
    for sequence in schedule.sequences:
        if sequence.request is not counted:
            counted = sequence.request
            counted.clock.count_step(seconds)


def _failed(error: Exception) -> PagewireError:
    """What a client is told of a fault of ours: its kind, but nothing of its inside."""
    if isinstance(error, ResourceExhaustedError):
        return error
    return InternalError(
        f"the engine failed on this request ({type(error).__name__}); its log says more"
    )
