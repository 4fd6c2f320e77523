"""The boundary between engine and workers."""

from __future__ import annotations

from typing import Protocol

from pagewire_engine.step import StepPlan, StepResult, WorkerInfo


class Executor(Protocol):
    """Runs steps somewhere: in this process, in others, on other machines."""

    def info(self) -> WorkerInfo:
        """What was loaded."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step.

        A worker whose execute raised has remembered the plan's sequences and block tables and done
        its swaps, but appended no token: the same sequences may be scheduled again, alone or
        together, and nothing is counted twice. Its swaps must not be sent again: a block swapped
        out may hold something else by then.
        """
        ...

    def shutdown(self) -> None:
        """Frees the workers. Safe to call twice."""
        ...
