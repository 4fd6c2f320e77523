"""The boundary between engine and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.step import StepPlan, StepResult, WorkerInfo


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Waits for what it produced. Called once, from any thread, in the order of launches.

        Raises:
            UnavailableError: the device or the workers have failed; no later step can do better.
        """
        ...


@dataclass(frozen=True, slots=True)
class LandedStep:
    """A PendingStep that was computed by `launch` itself."""

    landed: StepResult

    def result(self) -> StepResult:
        return self.landed


class Executor(Protocol):
    """Runs steps somewhere: in this process, in others, on other machines."""

    @property
    def launches_ahead(self) -> bool:
        """Whether `launch` leaves the computing to a device, and returns before it is done."""
        ...

    def info(self) -> WorkerInfo:
        """What was loaded."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step. The next one may be launched before this one's result is there: a plan
        need not name the tokens that it goes on from. At most two steps may be under way.

        A worker whose launch raised has remembered the plan's sequences and block tables and done
        its swaps, but appended no token: the same sequences may be scheduled again, alone or
        together, and nothing is counted twice; but only once all steps launched before have given
        their results. Its swaps must not be sent again: a block swapped out may hold something
        else by then.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches a step and waits for its result."""
        ...

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        """Reads an adapter into the workers' host memory. From any thread, beside steps.

        Args:
            number: what plans will call it; a new one.
            folder: its files.

        Raises:
            PagewireError: it can't be served, or no adapter can.
        """
        ...

    def drop_adapter(self, number: int) -> None:
        """Lets go of an adapter that no plan names any more. From any thread; waits for a step
        that is being computed. One that is not there is no error."""
        ...

    def adapter_memory(self) -> AdapterMemory:
        """Where adapters are. From any thread."""
        ...

    def shutdown(self) -> None:
        """Frees the workers. Safe to call twice."""
        ...
