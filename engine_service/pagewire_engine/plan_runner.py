"""Launches steps so that the next one is prepared while one is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pagewire_engine.executor.base import Executor, PendingStep
from pagewire_engine.step import StepPlan, StepResult


class SkippedError(Exception):
    """The plan was not executed, since one before it had failed."""


@dataclass(frozen=True, slots=True)
class _LaunchedElsewhere:
    """A step that another thread launches."""

    future: Future[PendingStep]

    def result(self) -> StepResult:
        return self.future.result().result()


@dataclass(frozen=True, slots=True)
class _FailedToLaunch:
    """A step that raised when it was launched."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


class PlanRunner:
    """Launches plans in their order, and none behind one that failed to launch.

    An executor that computes in `launch` does so on a thread of this object's. One that leaves the
    computing to a device is called at once: to hand the plan to a thread, and the interpreter to
    that thread, would only keep the device waiting.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread: ThreadPoolExecutor | None = None
        if not executor.launches_ahead:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-worker")
        self._failed = False

    @property
    def has_failed(self) -> bool:
        """Whether plans are skipped, until `resume`."""
        return self._failed

    def launch(self, plan: StepPlan) -> PendingStep:
        """Lets a plan be executed. Its result raises what the executor raised, or SkippedError."""
        if self._thread is not None:
            return _LaunchedElsewhere(self._thread.submit(self._launch, plan))
        try:
            return self._launch(plan)
        except Exception as error:
            return _FailedToLaunch(error)

    def resume(self) -> None:
        """What is launched from now on is executed again. All that was launched must have ended."""
        self._failed = False

    def close(self) -> None:
        """Ends the thread after what was launched. Safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown()

    def _launch(self, plan: StepPlan) -> PendingStep:
        if self._failed:
            raise SkippedError
        try:
            return self._executor.launch(plan)
        except BaseException:
            self._failed = True
            raise
