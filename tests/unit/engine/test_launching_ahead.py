"""An executor that leaves the computing to a device is launched by the engine's own thread, a step
ahead of the results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagewire.errors import UnavailableError
from pagewire_engine.engine import Engine
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.plan_runner import PlanRunner, SkippedError
from pagewire_engine.step import StepPlan, StepResult
from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.harness import EOS, Harness, alone, settings, submission


class DeviceExecutor(FakeExecutor):
    """Computes when it is launched, and tells no earlier than it is asked."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.under_way: deque[PendingStep] = deque()
        self.most_under_way = 0
        self.threads: set[int] = set()
        self.result_error: Exception | None = None

    @property
    def launches_ahead(self) -> bool:
        return True

    def launch(self, plan: StepPlan) -> PendingStep:
        self.threads.add(threading.get_ident())
        pending = _Pending(self, super().launch(plan))
        self.under_way.append(pending)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return pending


class _Pending:
    def __init__(self, executor: DeviceExecutor, landed: PendingStep) -> None:
        self._executor, self._landed = executor, landed

    def result(self) -> StepResult:
        assert self._executor.under_way.popleft() is self, "results were asked for out of order"
        if self._executor.result_error is not None:
            raise self._executor.result_error
        return self._landed.result()


@contextmanager
def ahead(
    on_execute: Callable[[StepPlan], None] | None = None, **changes: Any
) -> Iterator[tuple[Harness, DeviceExecutor]]:
    harness = Harness(settings(**changes))
    executor = DeviceExecutor(
        harness.settings.num_blocks,
        harness.settings.block_size,
        num_cpu_blocks=harness.settings.num_cpu_blocks,
        on_execute=on_execute,
    )
    harness.executor = executor
    harness.engine = Engine(
        executor, eos_token_ids=[EOS], settings=harness.settings, overlaps_steps=True
    )
    yield harness, executor
    harness.engine.close()


def test_the_next_step_is_launched_before_the_result_is_asked_for() -> None:
    with ahead() as (harness, executor):
        harness.add(submission("a", range(6), max_tokens=4))
        assert not harness.step()
        harness.step()
        assert len(harness.tokens("a")[0]) == 1
        assert executor.plans == 2
        harness.run()
        assert harness.tokens("a") == alone(submission("a", range(6), max_tokens=4))
        assert executor.most_under_way == 2
        assert executor.threads == {threading.get_ident()}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_answers_are_the_same_with_preemption_and_aborts(mode: str) -> None:
    requests = [
        submission(str(number), [number] * 9, max_tokens=12, temperature=1.0) for number in range(3)
    ]
    with ahead(num_blocks=8, num_cpu_blocks=8, max_model_len=32, preemption_mode=mode) as (
        harness,
        executor,
    ):
        harness.add(*requests, submission("gone", [7] * 5, max_tokens=20))
        for _ in range(3):
            harness.step()
        harness.engine.abort("gone")
        harness.run()
        assert harness.engine.stats().num_preemptions > 0
        assert executor.most_under_way == 2
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_a_launch_that_fails_takes_only_the_request_at_fault() -> None:
    def fail(plan: StepPlan) -> None:
        sequences = executor.sequences
        if any(99 in sequences[e.sequence_id].new.prompt_token_ids for e in plan.scheduled):
            # What was launched before has given its result before anything is tried again.
            assert len(executor.under_way) == 0 or plan.step not in seen
            seen.append(plan.step)
            raise RuntimeError("poisoned")

    seen: list[int] = []
    good = [submission(str(n), range(n, n + 6), n=2, temperature=1.0) for n in range(3)]
    with ahead(on_execute=fail) as (harness, executor):
        harness.add(*good)
        for _ in range(3):
            harness.step()
        harness.add(submission("bad", [99, 98], max_tokens=9))
        harness.run()
    assert len(seen) > 1
    assert harness.requests["bad"].error is not None
    for request in good:
        assert harness.tokens(request.request_id) == alone(request)


def test_a_device_that_fails_ends_the_engine() -> None:
    with ahead() as (harness, executor):
        harness.add(submission("a", range(6), max_tokens=4))
        harness.step()
        executor.result_error = UnavailableError("an illegal memory access")
        with pytest.raises(UnavailableError, match="illegal memory access"):
            harness.step()
    assert harness.requests["a"].error is None


def test_nothing_is_launched_behind_a_launch_that_failed() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step == 1:
            raise RuntimeError("no")

    executor = DeviceExecutor(on_execute=fail)
    runner = PlanRunner(executor)
    failed, skipped = runner.launch(StepPlan(1)), runner.launch(StepPlan(2))
    assert runner.has_failed
    assert executor.plans == 1
    with pytest.raises(RuntimeError, match="no"):
        failed.result()
    with pytest.raises(SkippedError):
        skipped.result()
    runner.resume()
    assert runner.launch(StepPlan(3)).result().step == 3
    runner.close()
