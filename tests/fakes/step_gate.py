"""Holds an engine between two steps, so that a test does not race its loop."""

from __future__ import annotations

import threading

from pagewire_engine.step import StepPlan

TIMEOUT_S = 60.0


class StepGate:
    """The `on_execute` of a FakeExecutor: lets as many steps pass as it is told, at first all.

    Attributes:
        entered: steps that have come to the gate, whether they passed or wait.
        waiting: whether a step waits.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.waiting = False
        self._changed = threading.Condition()
        self._left: float = float("inf")

    def __call__(self, plan: StepPlan) -> None:
        with self._changed:
            self.entered += 1
            self.waiting = self._left <= 0
            assert self._changed.wait_for(lambda: self._left > 0, TIMEOUT_S), "nobody opened it"
            self.waiting = False
            self._left -= 1

    def shut(self) -> None:
        """Holds the next step, and all that follow."""
        self.let_pass(0)

    def let_pass(self, steps: float) -> None:
        """Lets this many steps pass, the one that waits included, and holds the next."""
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    def open(self) -> None:
        """Lets all steps pass."""
        self.let_pass(float("inf"))
