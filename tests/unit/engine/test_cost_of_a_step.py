"""The scheduler must not be what a GPU waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pagewire_engine.engine import Engine
from pagewire_engine.queues import SchedulerSettings
from tests.fakes.fake_executor import FreeExecutor
from tests.fakes.yardstick import seconds_of_a_counted_loop
from tests.unit.engine.harness import submission

NUM_SEQUENCES = 256


def costs_less(work: Callable[[], float], yardsticks: float) -> bool:
    """Whether some work takes less than so many yardsticks.

    Of both the fastest counts: on a busy machine most are slower, by caches and cores shared with
    others. It gets as many tries as it may take until a quiet moment comes.
    """
    yardstick = seconds = float("inf")
    for attempt in range(60):
        yardstick = min(yardstick, seconds_of_a_counted_loop())
        seconds = min(seconds, *(work() for _ in range(10)))
        if attempt >= 4 and seconds < yardsticks * yardstick:
            return True
    return False


@pytest.mark.parametrize("num_tenants", [1, 2])
def test_256_decodes_are_scheduled_and_booked_in_about_a_millisecond(num_tenants: int) -> None:
    """1.0 ms where the yardstick takes 20 ms, and half as much again where another tenant waits for
    a place; fails at twice that. `tests.bench.scheduler_cost` measures what it is."""
    executor = FreeExecutor()
    engine = Engine(
        executor,
        eos_token_ids=[1],
        settings=SchedulerSettings(
            max_num_seqs=NUM_SEQUENCES,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            block_size=16,
            num_blocks=20_000,
        ),
    )
    for number in range(NUM_SEQUENCES):
        tenant, prompt = str(number % num_tenants), range(100 + number % 16)
        engine.add(submission(str(number), prompt, max_tokens=1000, tenant=tenant))
    while engine.stats().step_decode_tokens < NUM_SEQUENCES:
        engine.step()
    for tenant in range(num_tenants):
        engine.add(submission(f"waits {tenant}", range(50), tenant=str(tenant)))

    def step() -> float:
        executor.seconds, begun = 0.0, time.thread_time()
        engine.step()
        return time.thread_time() - begun - executor.seconds

    assert costs_less(step, 0.1 if num_tenants == 1 else 0.15)
    assert engine.stats().step_decode_tokens == NUM_SEQUENCES
    assert engine.stats().num_waiting == num_tenants


def test_a_look_at_256_requests_costs_the_loop_less_than_a_step() -> None:
    """0.4 ms where the yardstick takes 20 ms; fails at three times that."""
    engine = Engine(
        FreeExecutor(),
        eos_token_ids=[1],
        settings=SchedulerSettings(
            max_num_seqs=NUM_SEQUENCES,
            max_num_batched_tokens=1 << 20,
            max_model_len=4096,
            block_size=16,
            num_blocks=20_000,
        ),
    )
    for number in range(NUM_SEQUENCES):
        engine.add(submission(str(number), range(900), max_tokens=1000))
    while engine.stats().step_decode_tokens < NUM_SEQUENCES:
        engine.step()

    def look() -> float:
        begun = time.thread_time()
        snapshot = engine.snapshot()
        seconds = time.thread_time() - begun
        assert len(snapshot.requests) == NUM_SEQUENCES
        return seconds

    assert costs_less(look, 0.06)
