"""The engine's thread: drain the inbox, step, publish."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from pagewire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.block_map import Snapshot
from pagewire_engine.engine import Engine
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.stats import EngineStats
from pagewire_engine.submission import Submission

logger = logging.getLogger(__name__)

# How long others wait for the step that is under way: `drain` when its time is over, and a reset.
_LAST_STEP_S = 10.0
_LEAST_LOOK_INTERVAL_S = 0.05
# Between two looks whether an adapter's weights have come, where nothing else is to be done.
_ADAPTER_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """What heartbeats carry, so that a stuck loop is told from a slow or an idle one.

    Attributes:
        step: the step the loop is in, or the last one it finished.
        age_s: seconds since that step began or ended.
        busy: whether a step is being computed.
    """

    step: int
    age_s: float
    busy: bool


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    sequence_index: int | None
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _FailAll:
    error: PagewireError
    done: Callable[[int], None]
    adapter: int | None = None


@dataclass(frozen=True, slots=True)
class _Look:
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _ResetPrefixCache:
    done: Future[int]


class EngineLoop:
    """Runs an engine on a thread of its own. Every public method may be called from any thread.

    Callers only touch the inbox, under a lock that the loop holds no longer than it takes to hand
    the inbox's requests to the engine: neither waits for a step.

    Args:
        engine: used by the loop's thread alone from `start()` on.
        publish: called on the loop's thread with what a step has to tell.
        on_death: called on the loop's thread, once, when it can't go on.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[StepOutputs], None],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._on_death = on_death
        self._wake = threading.Condition()
        self._inbox: list[Submission | _Abort | _FailAll | _Look | _ResetPrefixCache] = []
        # Whether an id will be live once the inbox is emptied, where that differs from now.
        self._inbox_ids: dict[str, bool] = {}
        self._submitted: Counter[str] = Counter()
        self._inbox_tokens = 0
        self._draining = False
        self._stopping = False
        self._idle = True
        self._progress = (0, time.monotonic(), False)
        self._snapshot: Snapshot | None = None
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in. Requests that are left are told nothing: to
        their frontends the engine is gone, and they go on elsewhere. Safe to call twice."""
        self.ask_to_stop()
        if self.alive and self._thread is not threading.current_thread():
            self._thread.join()

    def ask_to_stop(self) -> None:
        """`stop`, without waiting for the end."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def has_requests(self) -> bool:
        """Whether a request lives here or is on its way in."""
        with self._wake:
            return not self._has_ended()

    def submit(self, submission: Submission, *, more_follow: bool = False) -> None:
        """Hands a request to the loop.

        Args:
            submission: the request.
            more_follow: a loop that sleeps may sleep on, until `wake`, or until what waits fills a
                step: the first of many prompts would have one to itself.

        Raises:
            AlreadyExistsError: a live request has this id.
            ResourceExhaustedError: too many requests wait.
            UnavailableError: the engine takes no more requests.
        """
        request_id = submission.request_id
        # The step that is under way counts as time in the queue.
        submission = replace(submission, arrival=self._engine.now())
        with self._wake:
            if self._draining or self._stopping:
                raise UnavailableError("the engine is shutting down")
            if self._inbox_ids.get(request_id, request_id in self._engine):
                raise AlreadyExistsError(
                    f"a live request has the id {request_id!r}", field="request_id"
                )
            if not submission.resubmission:
                self._check_waiting_bound(submission.tenant)
            self._inbox.append(submission)
            self._inbox_ids[request_id] = True
            self._submitted[submission.tenant] += 1
            self._inbox_tokens += len(submission.prompt_token_ids)
            if (
                not more_follow
                or self._inbox_tokens >= self._engine.settings.max_num_batched_tokens
            ):
                self._wake.notify_all()

    def abort(
        self,
        request_id: str,
        sequence_index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """Ends a request, or one of its sequences, before the next step. Unknown ids are no
        error."""
        with self._wake:
            self._inbox.append(_Abort(request_id, sequence_index, reason))
            if sequence_index is None:
                self._inbox_ids[request_id] = False
            self._wake.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Takes no new request from now on, and waits for the live ones to end; after `timeout_s`
        fails the rest with UnavailableError. Returns how many it failed."""
        with self._wake:
            self._draining = True
            if self._wake.wait_for(self._has_ended, timeout_s):
                return 0
            failed: list[int] = []
            error = UnavailableError("the engine is shutting down")
            self._inbox.append(_FailAll(error, failed.append))
            self._wake.notify_all()
            self._wake.wait_for(self._has_ended, _LAST_STEP_S)
            return sum(failed)

    def fail_adapter(
        self, adapter: int, error: PagewireError, done: Callable[[int], None] = lambda count: None
    ) -> None:
        """Fails every request of an adapter before the next step.

        Args:
            adapter: its number.
            error: what they are told.
            done: called on the loop's thread with how many there were.
        """
        with self._wake:
            self._inbox.append(_FailAll(error, done, adapter))
            self._wake.notify_all()

    def wake(self) -> None:
        """What the engine waited for may be there, or what was submitted with `more_follow`."""
        with self._wake:
            self._wake.notify_all()

    def requests_by_adapter(self) -> dict[int, tuple[int, int]]:
        """See Engine.requests_by_adapter."""
        return self._engine.requests_by_adapter()

    def reset_prefix_cache(self, timeout_s: float = _LAST_STEP_S) -> int:
        """Forgets what blocks hold, before the next step. Returns how many were known.

        Raises:
            DeadlineExceededError: the step under way took longer than `timeout_s`; what blocks hold
                is forgotten after it.
            UnavailableError: the engine has stopped, or has not started.
        """
        command = _ResetPrefixCache(Future())
        with self._wake:
            if not (self.alive or self._stopping):
                raise UnavailableError("the engine has not started; try again later")
            self._inbox.append(command)
            self._wake.notify_all()
            self._wake.wait_for(lambda: command.done.done() or self._stopping, timeout_s)
        if command.done.done():
            return command.done.result()
        if self._stopping:
            raise UnavailableError("the engine is shutting down")
        raise DeadlineExceededError(
            f"the step under way takes longer than {timeout_s:g} s; the prefix cache is reset "
            "after it"
        )

    def progress(self) -> LoopProgress:
        step, since, busy = self._progress
        return LoopProgress(step, time.monotonic() - since, busy)

    def stats(self) -> EngineStats:
        """The engine's figures. What was submitted during the step under way waits, too."""
        with self._wake:
            stats = self._engine.stats()
            return replace(stats, num_waiting=stats.num_waiting + self._submitted.total())

    def look(self, timeout_s: float) -> Snapshot | None:
        """Who holds which block: as of the next pause between two steps, or of the last look if
        that was a moment ago. When that pause does not come in time, what was seen last; None if
        nothing was."""
        seen = threading.Event()
        with self._wake:
            if self._stopping:
                return self._snapshot
            self._inbox.append(_Look(seen.set))
            self._wake.notify_all()
        seen.wait(timeout_s)
        return self._snapshot

    def _has_ended(self) -> bool:
        return (self._idle and not self._inbox) or self._stopping

    def _check_waiting_bound(self, tenant: str) -> None:
        """A full queue still takes requests of a tenant that has less than an equal part of it, or
        else one tenant's flood would shut out the others. With k tenants, no more can wait than
        the bound times 1 + 1/2 + ... + 1/k."""
        limit, waiting = self._engine.settings.max_waiting_requests, self._engine.queues.waiting
        total = len(waiting) + self._submitted.total()
        if total < limit:
            return
        own = waiting.num_waiting(tenant) + self._submitted[tenant]
        newcomers = sum(not waiting.num_waiting(each) for each in {tenant, *self._submitted})
        num_tenants = waiting.num_tenants + newcomers
        if own >= limit // num_tenants:
            raise ResourceExhaustedError(
                f"{total} requests wait already (--max-waiting-requests {limit}); try again later",
                retry_after_s=self._engine.retry_after_s(),
            )

    # Called by the loop's thread only.

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                self._progress = (self._progress[0] + 1, time.monotonic(), True)
                outputs = self._step()
                self._progress = (outputs.step, time.monotonic(), False)
                if outputs:
                    self._tell(outputs)
        except Exception:
            self._give_up()

    def _drain_inbox(self) -> bool:
        """Hands what came in to the engine; sleeps until there is work. False: stop."""
        with self._wake:
            while True:
                if self._stopping:
                    return False
                self._empty_inbox()
                had_work, self._idle = not self._idle, not self._engine.has_work
                self._wake.notify_all()
                if not self._idle:
                    if self._engine.awaits_adapter:
                        # Whoever fetches it calls `wake`; others may, too.
                        self._wake.wait(_ADAPTER_WAIT_S)
                        self._empty_inbox()
                    return True
                if had_work:
                    self._engine.check_at_rest()
                self._wake.wait_for(lambda: self._inbox or self._stopping)

    def _empty_inbox(self) -> None:
        for command in self._inbox:
            if isinstance(command, _Abort):
                self._engine.abort(command.request_id, command.sequence_index, command.reason)
            elif isinstance(command, _FailAll):
                command.done(self._engine.fail_all(command.error, command.adapter))
            elif isinstance(command, _Look):
                self._look_now()
                command.done()
            elif isinstance(command, _ResetPrefixCache):
                command.done.set_result(self._engine.reset_prefix_cache())
            else:
                self._engine.add(command)
        self._inbox.clear()
        self._inbox_ids.clear()
        self._submitted.clear()
        self._inbox_tokens = 0

    def _look_now(self) -> None:
        """Takes a snapshot, but spends no more than a hundredth of the time on them."""
        started = time.monotonic()
        if started < self._next_look:
            return
        try:
            self._snapshot = self._engine.snapshot()
        except Exception:
            logger.exception("The engine could not be looked at.")
        ended = time.monotonic()
        self._next_look = ended + max(_LEAST_LOOK_INTERVAL_S, 100 * (ended - started))

    def _step(self) -> StepOutputs:
        try:
            return self._engine.step()
        except UnavailableError:
            raise
        except Exception:
            # Not a request's fault, which the engine isolates, but ours: all get an answer.
            logger.exception("The engine failed in a step; all its requests fail.")
            self._engine.fail_all(InternalError("the engine failed; its log has the details"))
            return self._engine.take_outputs()

    def _give_up(self) -> None:
        """The model's workers are gone, or the loop has a fault. Its requests, told nothing, go on
        elsewhere; until `on_death` has ended the process, it looks like a step without end."""
        logger.critical("The engine can't go on and must be restarted.", exc_info=True)
        self._progress = (self._progress[0], time.monotonic(), True)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._on_death()

    def _tell(self, outputs: StepOutputs) -> None:
        try:
            self._publish(outputs)
        except Exception:
            logger.exception("What step %d produced could not be published.", outputs.step)
