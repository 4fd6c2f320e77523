"""Executes steps on a thread of its own, so that the next one is prepared meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from pagewire_engine.executor.base import Executor
from pagewire_engine.step import StepPlan, StepResult


class SkippedError(Exception):
    """The plan was not executed, since one before it had failed."""


class PlanRunner:
    """Executes plans in the order in which they were launched, and none behind one that failed."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-worker")
        self._failed = False

    @property
    def has_failed(self) -> bool:
        """Whether plans are skipped, until `resume`."""
        return self._failed

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Lets a plan be executed. Its future raises what the executor raised, or SkippedError."""
        return self._thread.submit(self._execute, plan)

    def resume(self) -> None:
        """What is launched from now on is executed again. All that was launched must have ended."""
        self._failed = False

    def close(self) -> None:
        """Ends the thread after what was launched. Safe to call twice."""
        self._thread.shutdown()

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._failed:
            raise SkippedError
        try:
            return self._executor.execute(plan)
        except BaseException:
            self._failed = True
            raise
