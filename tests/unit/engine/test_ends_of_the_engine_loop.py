"""How the engine's thread ends, and what it survives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagewire.errors import (
    InternalError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.engine import Engine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.step import StepPlan
from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.harness import EOS, alone, settings, submission
from tests.unit.engine.running_loop import ENDLESS, TIMEOUT_S, Running


def test_drain_waits_for_the_end(start: Callable[..., Running]) -> None:
    running = start(FakeExecutor(32, 4, step_time_s=0.005))
    running.loop.submit(submission("x", range(5)))
    assert running.loop.drain(TIMEOUT_S) == 0
    assert running.answers.reasons == {("x", 0): FinishReason.LENGTH}
    with pytest.raises(UnavailableError):
        running.loop.submit(submission("y", range(5)))


def test_drain_fails_what_has_not_ended_in_time(start: Callable[..., Running]) -> None:
    running = start(FakeExecutor(1024, 4, step_time_s=0.01), max_num_seqs=1, **ENDLESS)
    for request_id in ("running", "waiting"):
        running.loop.submit(submission(request_id, range(5), max_tokens=None))
    running.answers.wait_for(lambda: ("running", 0) in running.answers.tokens)
    assert running.loop.drain(0.05) == 2
    assert {type(error) for error in running.answers.errors.values()} == {UnavailableError}
    assert running.engine.queues.blocks.num_available_blocks == 1024


def test_stop_ends_the_thread_without_a_word(start: Callable[..., Running]) -> None:
    running = start(FakeExecutor(1024, 4, step_time_s=0.01), **ENDLESS)
    running.loop.submit(submission("x", range(5), max_tokens=None))
    running.answers.wait_for(lambda: ("x", 0) in running.answers.tokens)
    running.loop.stop()
    running.loop.stop()
    assert not running.answers.errors
    assert not running.answers.reasons
    with pytest.raises(UnavailableError):
        running.loop.submit(submission("y", range(5)))


def test_a_fault_of_the_engine_itself_answers_everyone_and_the_loop_lives(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    with monkeypatch.context() as broken:
        broken.setattr(running.engine.scheduler, "schedule", lambda step: 1 / 0)
        running.loop.submit(submission("x", range(5)))
        running.answers.wait_for_end("x")
    assert isinstance(running.answers.errors["x"], InternalError)
    running.loop.submit(submission("y", range(5)))
    running.answers.wait_for_end("y")
    assert running.answers.reasons["y", 0] is FinishReason.LENGTH


def test_an_engine_that_lost_its_workers_looks_stuck(start: Callable[..., Running]) -> None:
    def die(plan: StepPlan) -> None:
        if plan.step == 3:
            raise UnavailableError("the worker process was killed")

    running = start(FakeExecutor(32, 4, on_execute=die))
    running.loop.submit(submission("x", range(5)))
    assert running.loop.drain(TIMEOUT_S) == 0
    assert running.answers.tokens["x", 0] == alone(submission("x", range(5)))[0][:2]
    assert not running.answers.errors
    assert not running.answers.reasons
    progress = running.loop.progress()
    assert (progress.step, progress.busy) == (3, True)
    running.loop.stop()
    assert running.deaths == [3]
    with pytest.raises(UnavailableError):
        running.loop.submit(submission("y", range(5)))


def test_a_loop_with_a_fault_of_its_own_looks_stuck(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    monkeypatch.setattr(running.engine, "abort", lambda *_: 1 / 0)
    running.loop.abort("x")
    assert running.loop.drain(TIMEOUT_S) == 0
    assert running.loop.progress().busy
    running.loop.stop()
    assert len(running.deaths) == 1


def test_a_loop_that_is_stopped_has_not_died(start: Callable[..., Running]) -> None:
    running = start()
    running.loop.stop()
    assert not running.deaths


def test_a_publisher_that_fails_does_not_end_the_loop() -> None:
    executor = FakeExecutor(32, 4)
    calls: list[StepOutputs] = []

    def publish(outputs: StepOutputs) -> None:
        calls.append(outputs)
        if len(calls) == 1:
            raise RuntimeError("once")

    engine = Engine(executor, eos_token_ids=[EOS], settings=settings())
    loop = EngineLoop(engine, publish)
    loop.start()
    loop.submit(submission("x", range(5)))
    assert loop.drain(TIMEOUT_S) == 0
    loop.stop()
    assert len(calls) == 8
