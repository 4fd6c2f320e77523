"""The engine's thread, used from many others."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from pagewire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.engine import Engine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.outputs import StepOutputs
from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.harness import EOS, alone, settings, submission
from tests.unit.engine.running_loop import ENDLESS, TIMEOUT_S, Gate, Running


def test_a_request_is_answered(start: Callable[..., Running]) -> None:
    running = start()
    request = submission("x", range(9), n=2, temperature=1.0)
    running.loop.submit(request)
    running.answers.wait_for_end("x", 2)
    assert [running.answers.tokens["x", index] for index in (0, 1)] == alone(request)


@pytest.mark.parametrize("lengths", [(5, 6, 7), (40, 24)], ids=["woken", "a full step"])
def test_prompts_that_follow_one_another_share_their_first_step(
    start: Callable[..., Running], lengths: tuple[int, ...]
) -> None:
    steps: list[int] = []
    running = start(FakeExecutor(32, 4, on_execute=lambda plan: steps.append(len(plan.scheduled))))
    for number, length in enumerate(lengths):
        running.loop.submit(submission(f"r{number}", range(length), max_tokens=1), more_follow=True)
    if sum(lengths) < running.engine.settings.max_num_batched_tokens:
        assert not running.answers.published
        running.loop.wake()
    for number in range(len(lengths)):
        running.answers.wait_for_end(f"r{number}")
    assert steps[0] == len(lengths)


def test_what_comes_during_a_step_counts_as_waiting_at_once(start: Callable[..., Running]) -> None:
    gate = Gate()
    running = start(FakeExecutor(32, 4, on_execute=gate))
    running.loop.submit(submission("first", range(5)))
    assert gate.entered.wait(TIMEOUT_S)
    for number in range(20):
        running.loop.submit(submission(f"r{number}", range(5), max_tokens=1))
    stats = running.loop.stats()
    gate.open.set()
    assert (stats.num_running, stats.num_waiting) == (1, 20)
    for number in range(20):
        running.answers.wait_for_end(f"r{number}")
    assert running.loop.stats().num_waiting == 0


def test_the_prefix_cache_is_reset_between_two_steps(start: Callable[..., Running]) -> None:
    gate = Gate()
    gate.open.set()
    running = start(FakeExecutor(32, 4, on_execute=gate))
    running.loop.submit(submission("x", range(9), max_tokens=1))
    running.answers.wait_for_end("x")
    gate.open.clear()
    gate.entered.clear()
    running.loop.submit(submission("y", range(20, 24), max_tokens=1))
    assert gate.entered.wait(TIMEOUT_S)
    with pytest.raises(DeadlineExceededError, match="the step under way"):
        running.loop.reset_prefix_cache(timeout_s=0.01)
    gate.open.set()
    running.answers.wait_for_end("y")
    # One was to be done after the step, and found what there was.
    assert running.loop.reset_prefix_cache(timeout_s=TIMEOUT_S) == 0
    assert running.loop.stats().num_cached_blocks == 0


def test_no_reset_waits_for_a_loop_that_does_not_run(start: Callable[..., Running]) -> None:
    with pytest.raises(UnavailableError, match="not started"):
        Running(FakeExecutor(32, 4)).loop.reset_prefix_cache()
    running = start()
    running.loop.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        running.loop.reset_prefix_cache()


def test_an_idle_loop_sleeps_and_wakes_at_once(start: Callable[..., Running]) -> None:
    running = start()
    running.loop.submit(submission("a", range(5)))
    running.answers.wait_for_end("a")
    # Its last step is published before it is over.
    deadline = time.monotonic() + 10
    while running.loop.progress().busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert running.loop._thread.ident is not None
    clock = time.pthread_getcpuclockid(running.loop._thread.ident)
    step, cpu = running.loop.progress().step, time.clock_gettime(clock)
    time.sleep(0.3)
    assert running.loop.progress().step == step
    assert not running.loop.progress().busy
    assert time.clock_gettime(clock) - cpu < 0.1, "it does not sleep"
    running.loop.submit(submission("b", range(5), max_tokens=1))
    running.answers.wait_for_end("b")


def test_a_block_that_was_lost_is_told_once(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    running = start(FakeExecutor(32, 4))

    def run(request_id: str) -> None:
        running.loop.submit(submission(request_id, range(5), max_tokens=2))
        running.answers.wait_for_end(request_id)
        # Idle again: it answers at once.
        assert running.loop.reset_prefix_cache() >= 0

    run("a")
    assert not caplog.messages
    blocks = running.engine.queues.blocks
    lost = blocks._take()
    run("b")
    run("c")
    assert running.loop.drain(TIMEOUT_S) == 0
    told = [
        message for message in caplog.messages if "are held though no request is left" in message
    ]
    assert [message.split()[0] for message in told] == ["1"]
    blocks._ref_counts[lost] = 0
    blocks._give_back(lost)


def test_submit_and_abort_do_not_wait_for_a_step(start: Callable[..., Running]) -> None:
    gate = Gate()
    running = start(FakeExecutor(32, 4, on_execute=gate))
    running.loop.submit(submission("x", range(5)))
    assert gate.entered.wait(TIMEOUT_S)
    running.loop.submit(submission("y", range(5)))
    running.loop.abort("x")
    assert running.loop.stats().num_running == 1
    gate.open.set()
    running.answers.wait_for_end("x")
    running.answers.wait_for_end("y")
    assert running.answers.reasons["x", 0] is FinishReason.ABORT
    assert running.answers.tokens["x", 0] == alone(submission("x", range(5)))[0][:1]


def test_progress_tells_a_stuck_step_from_an_idle_loop(start: Callable[..., Running]) -> None:
    gate = Gate()
    running = start(FakeExecutor(32, 4, on_execute=gate))
    assert not running.loop.progress().busy
    running.loop.submit(submission("x", range(5)))
    assert gate.entered.wait(TIMEOUT_S)
    first = running.loop.progress()
    time.sleep(0.05)
    second = running.loop.progress()
    assert first.busy
    assert second.busy
    assert first.step == second.step == 1
    assert second.age_s >= first.age_s + 0.05
    gate.open.set()
    running.answers.wait_for_end("x")
    assert running.loop.progress().step >= 8


def test_a_live_id_is_refused_wherever_its_request_is(start: Callable[..., Running]) -> None:
    gate = Gate()
    running = start(FakeExecutor(32, 4, on_execute=gate))
    running.loop.submit(submission("x", range(5)))
    assert gate.entered.wait(TIMEOUT_S)
    running.loop.submit(submission("inbox", range(5)))
    for request_id in ("x", "inbox"):
        with pytest.raises(AlreadyExistsError):
            running.loop.submit(submission(request_id, range(5)))
    gate.open.set()
    for request_id in ("x", "inbox"):
        running.answers.wait_for_end(request_id)
    assert not running.answers.errors


@pytest.mark.parametrize("in_step", [True, False])
def test_an_aborted_id_can_be_used_again_at_once(in_step: bool) -> None:
    gate = Gate()
    outputs: list[StepOutputs] = []
    executor = FakeExecutor(1024, 4, on_execute=gate, step_time_s=0.002)
    engine = Engine(executor, eos_token_ids=[EOS], settings=settings(**ENDLESS))
    loop = EngineLoop(engine, outputs.append)
    if not in_step:
        gate.open.set()
    loop.start()
    loop.submit(submission("x", range(5), max_tokens=None))
    assert gate.entered.wait(TIMEOUT_S)
    loop.abort("x")
    again = submission("x", range(9))
    loop.submit(again)
    with pytest.raises(AlreadyExistsError):
        loop.submit(again)
    gate.open.set()
    assert loop.drain(TIMEOUT_S) == 0
    loop.stop()
    told = [output for each in outputs for output in each.sequences]
    old_end = next(i for i, output in enumerate(told) if output.finish_reason is not None)
    assert told[old_end].finish_reason is FinishReason.ABORT
    new = told[old_end + 1 :]
    assert [token for output in new for token in output.token_ids] == alone(again)[0]
    assert new[-1].finish_reason is FinishReason.LENGTH


def test_too_many_waiting_requests_are_turned_away(start: Callable[..., Running]) -> None:
    gate = Gate()
    running = start(FakeExecutor(32, 4, on_execute=gate), max_waiting_requests=2, max_num_seqs=1)
    running.loop.submit(submission("running", range(5)))
    assert gate.entered.wait(TIMEOUT_S)
    running.loop.submit(submission("a", range(5)))
    running.loop.submit(submission("b", range(5)))
    with pytest.raises(ResourceExhaustedError) as refused:
        running.loop.submit(submission("c", range(5)))
    assert refused.value.retry_after_s
    running.loop.submit(replace(submission("again", range(5)), resubmission=True))
    gate.open.set()
    for request_id in ("running", "a", "b", "again"):
        running.answers.wait_for_end(request_id)
    running.loop.submit(submission("c", range(5)))
    running.answers.wait_for_end("c")


def test_many_threads_submit_and_abort(start: Callable[..., Running]) -> None:
    """All that was accepted ends once; what was not aborted is answered as if alone."""
    gate = Gate()
    running = start(
        FakeExecutor(12, 4, on_execute=gate),
        num_blocks=12,
        max_num_batched_tokens=12,
        max_num_seqs=6,
    )
    # Until then the loop waits, or it might be faster than they, and never short of blocks.
    half_submitted = threading.Barrier(6, action=gate.open.set)
    requests = {
        f"{worker}/{number}": submission(
            f"{worker}/{number}",
            range(worker, worker + 3 + number),
            n=1 + number % 2,
            temperature=float(number % 2),
            max_tokens=6,
        )
        for worker in range(6)
        for number in range(8)
    }

    def work(worker: int) -> None:
        for number in range(8):
            request = requests[f"{worker}/{number}"]
            running.loop.submit(request)
            if number % 3 == 2:
                running.loop.abort(request.request_id, 0 if number % 2 else None)
            if number == 3:
                half_submitted.wait(TIMEOUT_S)
            if number % 4 == 3:
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request_id, request in requests.items():
        running.answers.wait_for_end(request_id, request.sampling_params.n)
    assert not running.answers.errors
    for (request_id, index), reason in running.answers.reasons.items():
        tokens = running.answers.tokens[request_id, index]
        whole = alone(requests[request_id])[index]
        assert tokens == (whole[: len(tokens)] if reason is FinishReason.ABORT else whole)
    stats = running.loop.stats()
    assert stats.num_preemptions > 0
    assert stats.num_requests_finished == len(requests)
    assert stats.num_free_blocks + stats.num_cached_blocks == 12


def test_a_flood_of_long_prompts_hardly_holds_up_the_loop(start: Callable[..., Running]) -> None:
    """Submit is a note in the inbox: its cost does not depend on the prompt."""
    running = start(
        FakeExecutor(32, 4, step_time_s=0.002), max_waiting_requests=10_000, max_num_seqs=1
    )
    running.loop.submit(submission("decoding", range(5), max_tokens=None))
    running.answers.wait_for(lambda: ("decoding", 0) in running.answers.tokens)
    prompt = list(range(8000))
    seconds = []
    for number in range(200):
        request = replace(submission(str(number), range(5)), prompt_token_ids=prompt)
        begun = time.perf_counter()
        running.loop.submit(request)
        seconds.append(time.perf_counter() - begun)
    assert statistics.median(seconds) < 0.05
    running.answers.wait_for_end("decoding")
    running.answers.wait_for(lambda: len(running.answers.errors) == 200)


def test_time_spent_behind_the_step_under_way_counts_as_time_in_the_queue() -> None:
    gate = Gate()
    running = Running(FakeExecutor(32, 4, on_execute=gate))
    running.loop.start()
    before = running.engine.now()
    running.loop.submit(submission("first", range(5), max_tokens=1))
    assert gate.entered.wait(TIMEOUT_S)
    entered = running.engine.now()
    running.loop.submit(submission("second", range(5), max_tokens=1))
    time.sleep(0.3)
    gate.open.set()
    running.answers.wait_for_end("second")
    running.loop.stop()
    assert running.answers.times["second", 0].queue_s >= 0.3
    assert running.answers.times["first", 0].queue_s <= entered - before
