"""A loop that runs, and what it has told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason, RequestTimes
from pagewire_engine.engine import Engine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.step import StepPlan
from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.harness import EOS, settings

TIMEOUT_S = 20.0


class Answers:
    """Collects what a loop publishes, by request and sequence."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.times: dict[tuple[str, int], RequestTimes] = {}
        self.errors: dict[str, PagewireError] = {}
        self.published = 0

    def publish(self, outputs: StepOutputs) -> None:
        with self.changed:
            self.published += 1
            for output in outputs.sequences:
                key = (output.request_id, output.sequence_index)
                tokens = self.tokens.setdefault(key, [])
                assert output.start == len(tokens)
                assert key not in self.reasons
                tokens += output.token_ids
                if output.finish_reason is not None:
                    self.reasons[key] = output.finish_reason
                    assert output.times is not None
                    self.times[key] = output.times
            for failure in outputs.failures:
                assert failure.request_id not in self.errors
                self.errors[failure.request_id] = failure.error
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S), "it did not come"

    def wait_for_end(self, request_id: str, num_sequences: int = 1) -> None:
        keys = [(request_id, index) for index in range(num_sequences)]
        self.wait_for(lambda: request_id in self.errors or all(key in self.reasons for key in keys))


class Running:
    """A loop with its engine, executor and answers."""

    def __init__(self, executor: FakeExecutor, **changes: Any) -> None:
        self.executor = executor
        self.answers = Answers()
        self.engine = Engine(executor, eos_token_ids=[EOS], settings=settings(**changes))
        self.deaths: list[int] = []
        self.loop = EngineLoop(
            self.engine, self.answers.publish, lambda: self.deaths.append(self.loop.progress().step)
        )


# A request that nothing but an abort or the test's end will end.
ENDLESS = {"num_blocks": 1024, "max_model_len": 4096}


class Gate:
    """Holds steps up until told otherwise."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.entered.set()
        assert self.open.wait(TIMEOUT_S)
