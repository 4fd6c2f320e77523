"""Who may wait, for how long, and when who was turned away should come again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagewire.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.start_rate import StartRate
from pagewire_engine.submission import Submission
from tests.unit.engine.harness import Harness, alone, settings, submission


def loop_with_bound(limit: int) -> EngineLoop:
    """It is not started, so that what is submitted stays where it is."""
    harness = Harness(settings(max_waiting_requests=limit))
    return EngineLoop(harness.engine, lambda outputs: None)


def flood(loop: EngineLoop, tenant: str) -> int:
    """Submits until it is turned away; returns how many were taken."""
    for count in range(1000):
        try:
            loop.submit(submission(f"{tenant}-{count}", range(5), tenant=tenant))
        except ResourceExhaustedError:
            return count
    raise AssertionError("there is no bound")


def test_one_tenants_flood_leaves_room_for_others() -> None:
    harness = Harness(settings(max_waiting_requests=12, max_num_seqs=1))
    loop = EngineLoop(harness.engine, lambda outputs: None)
    assert flood(loop, "big") == 12
    loop._empty_inbox()
    assert flood(loop, "small") == 6
    loop._empty_inbox()
    assert flood(loop, "third") == 4
    loop._empty_inbox()
    assert flood(loop, "big, again") == 3
    assert len(harness.engine.queues.waiting) == 22


def test_below_the_bound_nobody_has_a_part() -> None:
    loop = loop_with_bound(8)
    loop.submit(submission("first", range(5), tenant="small"))
    assert flood(loop, "big") == 7


def test_what_was_admitted_elsewhere_is_not_turned_away() -> None:
    loop = loop_with_bound(2)
    flood(loop, "big")
    again = replace(submission("again", range(5), tenant="big"), resubmission=True)
    loop.submit(again)


def test_who_is_turned_away_is_told_when_half_of_the_queue_will_have_started() -> None:
    rate = StartRate()
    assert rate.retry_after_s(1000, now=0.0) == 1.0
    for tick in range(400):
        rate.count(100 + tick / 4)
    assert rate.per_second(200.0) == pytest.approx(4, rel=0.05)
    assert rate.retry_after_s(100, now=200.0) == pytest.approx(100 / 2 / 4, rel=0.05)
    assert rate.retry_after_s(2, now=200.0) == 1.0
    assert rate.retry_after_s(10_000, now=200.0) == 60.0
    # Nothing has started since: it takes longer, and never beyond the bound.
    assert rate.retry_after_s(100, now=210.0) > 2 * rate.retry_after_s(100, now=200.0)
    assert rate.retry_after_s(100, now=1e6) == 60.0


def test_a_young_rate_is_not_too_low() -> None:
    rate = StartRate()
    for tick in range(20):
        rate.count(tick / 10)
    assert rate.per_second(2.0) == pytest.approx(10, rel=0.2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_with_deadline(*requests: Submission, after: float, limit: float | None = 2.0) -> Harness:
    clock = Clock()
    harness = Harness(settings(max_num_seqs=1, max_queue_time_s=limit), clock=clock)
    harness.add(submission("running", range(5), max_tokens=30), *requests)
    harness.step()
    clock.now = after
    harness.step()
    return harness


def test_what_waits_too_long_for_its_start_fails_and_the_others_go_on() -> None:
    waits = submission("waits", range(5))
    harness = run_with_deadline(waits, after=2.5)
    assert isinstance(harness.requests["waits"].error, DeadlineExceededError)
    assert "2 s" in str(harness.requests["waits"].error)
    harness.run()
    assert len(harness.tokens("running")[0]) == 30


@pytest.mark.parametrize(("after", "limit"), [(1.5, 2.0), (1e6, None)])
def test_in_time_or_without_a_limit_it_waits_on(after: float, limit: float | None) -> None:
    waits = submission("waits", range(5))
    harness = run_with_deadline(waits, after=after, limit=limit)
    harness.run()
    assert harness.tokens("waits") == alone(waits)


def test_a_preempted_request_does_not_wait_for_its_start() -> None:
    clock = Clock()
    harness = Harness(settings(num_blocks=6, max_queue_time_s=2.0), clock=clock)
    requests = [submission(str(n), range(7)) for n in range(3)]
    harness.add(*requests)
    while not harness.engine.stats().num_preemptions:
        harness.step()
    clock.now = 100.0
    harness.run()
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_a_resubmitted_request_has_no_deadline_here() -> None:
    again = replace(submission("again", range(5)), resubmission=True)
    harness = run_with_deadline(again, after=100.0)
    harness.run()
    assert harness.tokens("again") == alone(again)


def test_what_can_never_run_fails_at_once_behind_a_long_queue() -> None:
    harness = Harness(settings(num_blocks=4, max_num_seqs=1))
    harness.add(*(submission(str(n), range(5)) for n in range(500)))
    harness.step()
    harness.add(submission("never", range(30), max_tokens=50))
    harness.step()
    error = harness.requests["never"].error
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "prompt_token_ids"
    assert "4 blocks" in str(error)
    assert len(harness.engine.queues.waiting) == 499
