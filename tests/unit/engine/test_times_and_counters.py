"""What the engine tells about a request's life and its own."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pagewire.v1 import engine_pb2
from pagewire_engine.stats import EngineStats
from tests.unit.engine.harness import Harness, settings, submission


class Clock:
    """One second a reading would be noise; tests move it by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_request_s_seconds_are_split_between_queue_prefill_and_decode() -> None:
    clock = Clock()

    def tick(_: object) -> None:
        clock.now += 1.0

    harness = Harness(settings(max_num_batched_tokens=4), clock=clock, on_execute=tick)
    harness.add(submission("x", range(10), max_tokens=5))
    clock.now += 7.0
    harness.run()
    times = harness.requests["x"].ends[0].times
    assert times is not None
    assert (times.queue_s, times.prefill_s, times.decode_s) == (7.0, 3.0, 4.0)


def test_a_request_counts_the_steps_that_computed_something_of_it_and_their_seconds() -> None:
    clock = Clock()

    def tick(_: object) -> None:
        clock.now += 1.0

    harness = Harness(settings(max_num_batched_tokens=4), clock=clock, on_execute=tick)
    harness.add(submission("x", range(10), max_tokens=5), submission("y", range(4), n=2))
    harness.run()
    times = harness.requests["x"].ends[0].times
    assert times is not None
    assert (times.steps, times.step_s) == (3 + 4, 7.0)
    # Its two sequences share steps, and wait for none of the other's prefill.
    times = harness.requests["y"].ends[1].times
    assert times is not None
    assert times.steps < harness.engine.stats().step
    assert times.step_s == times.steps


def test_what_came_before_the_first_token_is_told_with_it() -> None:
    clock = Clock()

    def tick(_: object) -> None:
        clock.now += 1.0

    harness = Harness(settings(max_num_batched_tokens=4), clock=clock, on_execute=tick)
    harness.add(submission("x", range(10), n=2))
    clock.now += 7.0
    told = [output for _ in range(4) for output in harness.step().sequences]
    assert [output.times is not None for output in told] == [True] + [False] * (len(told) - 1)
    times = told[0].times
    assert times is not None
    assert (times.queue_s, times.prefill_s, times.decode_s) == (7.0, 3.0, 0.0)
    assert (times.steps, times.step_s) == (3, 3.0)


def test_a_request_that_ends_in_its_first_step_has_times() -> None:
    clock = Clock()

    def tick(_: object) -> None:
        clock.now += 1.0

    harness = Harness(clock=clock, on_execute=tick)
    harness.add(submission("x", range(10), max_tokens=1))
    clock.now += 7.0
    harness.run()
    times = harness.requests["x"].ends[0].times
    assert times is not None
    assert (times.queue_s, times.prefill_s, times.decode_s) == (7.0, 1.0, 0.0)


def test_a_request_aborted_in_the_queue_has_waited_all_its_life() -> None:
    clock = Clock()
    harness = Harness(clock=clock)
    harness.add(submission("x", range(10)))
    clock.now += 7.0
    harness.engine.abort("x")
    harness.run()
    times = harness.requests["x"].ends[0].times
    assert times is not None
    assert (times.queue_s, times.prefill_s, times.decode_s) == (7.0, 0.0, 0.0)


def test_counters() -> None:
    harness = Harness(settings(max_num_batched_tokens=8))
    harness.add(submission("x", range(10), max_tokens=5), submission("y", range(3), n=2))
    harness.step()
    stats = harness.engine.stats()
    assert (stats.step, stats.num_running, stats.num_waiting) == (1, 1, 1)
    assert stats.num_free_blocks == 32 - 3
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_prompt_tokens == 13
    assert stats.num_generation_tokens == 5 + 2 * 8
    assert stats.num_prefill_chunks == 3
    assert stats.num_requests_finished == 2
    assert stats.num_requests_failed == stats.num_preemptions == 0


def test_histograms_hold_each_step_s_tokens_and_seconds() -> None:
    clock = Clock()

    def tick(_: object) -> None:
        clock.now += 0.07

    harness = Harness(settings(max_num_batched_tokens=8), clock=clock, on_execute=tick)
    harness.add(submission("x", range(10), max_tokens=5))
    harness.run()
    stats = harness.engine.stats()
    tokens, seconds = stats.iteration_tokens, stats.step_time
    # Chunks of 8 and 2, then four decodes.
    assert dict(zip(tokens.bounds, tokens.counts, strict=False))[1] == 4
    assert dict(zip(tokens.bounds, tokens.counts, strict=False))[8] == 2
    assert (sum(tokens.counts), tokens.sum) == (6, 14)
    assert dict(zip(seconds.bounds, seconds.counts, strict=False))[0.08] == 6
    assert seconds.sum == pytest.approx(0.42)


def test_stats_are_what_the_control_api_tells() -> None:
    told = {spec.name for spec in engine_pb2.GetStatsResponse.DESCRIPTOR.fields}
    assert {spec.name for spec in fields(EngineStats)} == told - {
        "adapters",
        "delta_wire",
        "epoch",
        "num_sessions",
        "time_to_first_token",
        "tls_certificate_expires_at",
        "window",
    }


def test_a_seed_is_drawn_where_none_came() -> None:
    def seeds() -> list[int]:
        harness = Harness()
        harness.add(*(submission(str(i), range(5), seed=None) for i in range(3)))
        harness.step()
        return [new.seed for new in harness.plans[0].new_sequences]

    drawn = seeds()
    assert len(set(drawn)) == 3
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert seeds() == drawn


@pytest.mark.parametrize("seed", [0, -5, 2**63 - 1])
def test_a_given_seed_reaches_the_worker(seed: int) -> None:
    harness = Harness()
    harness.add(submission("x", range(5), seed=seed))
    harness.step()
    assert harness.plans[0].new_sequences[0].seed == seed
