"""An exception or NaN in a step fails the request at fault, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagewire.errors import InternalError, UnavailableError
from pagewire_engine.step import StepPlan
from tests.unit.engine.harness import Harness, Recorded, alone, settings, submission

POISON = 666


def poisoned_harness(**changes: int) -> Harness:
    """Raises whenever a sequence whose prompt holds POISON is computed."""

    def raise_for_poison(plan: StepPlan) -> None:
        for entry in plan.scheduled:
            new = harness.executor.sequences[entry.sequence_id].new
            if POISON in new.prompt_token_ids:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    harness = Harness(settings(**changes), on_execute=raise_for_poison)
    return harness


@pytest.mark.parametrize("budget", [64, 5])
def test_a_poisoned_request_fails_alone(budget: int) -> None:
    harness = poisoned_harness(max_num_batched_tokens=budget)
    good = [
        submission("a", range(9)),
        submission("b", range(6), n=3, temperature=1.0),
    ]
    harness.add(good[0], submission("poisoned", [3, POISON, 4], n=2), good[1])
    harness.run()
    error = harness.requests["poisoned"].error
    assert isinstance(error, InternalError)
    # The kind of the fault, and nothing of its inside: that stands in the engine's log.
    assert "RuntimeError" in str(error)
    assert "illegal memory access" not in str(error)
    for request in good:
        assert harness.tokens(request.request_id) == alone(request)
    stats = harness.engine.stats()
    assert (stats.num_requests_failed, stats.num_requests_finished) == (1, 2)


def test_a_step_that_fails_with_copies_under_way_is_repeated_exactly() -> None:
    """The rerun must do its copy-on-write again: whether the first try did is not known."""
    harness = poisoned_harness()
    forked = submission("forked", range(6), n=3, temperature=1.0)
    harness.add(forked)
    harness.step()
    harness.add(submission("poisoned", [3, POISON, 4]))
    harness.step()
    assert harness.plans[1].block_copies
    assert harness.plans[2].block_copies == harness.plans[1].block_copies
    harness.run()
    assert harness.tokens("forked") == alone(forked)


def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    failing = True

    def fail_once(plan: StepPlan) -> None:
        nonlocal failing
        if plan.step == 3 and failing:
            failing = False
            raise RuntimeError("once")

    harness = Harness(on_execute=fail_once)
    requests = [submission("a", range(9)), submission("b", range(6), n=2)]
    harness.add(*requests)
    harness.run()
    assert not failing
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_an_executor_that_always_fails_answers_everyone() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("broken")

    harness = Harness(on_execute=fail)
    harness.add(*(submission(str(i), range(5), n=2) for i in range(5)))
    harness.run()
    assert all(isinstance(r.error, InternalError) for r in harness.requests.values())


def test_a_sequence_whose_logits_are_not_numbers_fails_its_request() -> None:
    harness = Harness()
    neighbour = submission("y", range(6))
    harness.add(submission("x", range(5), n=2), neighbour)
    harness.step()
    harness.executor.nan_sequences.add(1)
    harness.run()
    assert isinstance(harness.requests["x"].error, InternalError)
    assert "not numbers" in str(harness.requests["x"].error)
    assert harness.tokens("y") == alone(neighbour)


def test_fail_all_answers_everyone_once() -> None:
    harness = Harness(settings(max_num_seqs=2))
    harness.add(*(submission(str(i), range(5)) for i in range(4)))
    harness.step()
    assert harness.engine.fail_all(UnavailableError("gone")) == 4
    assert harness.engine.fail_all(UnavailableError("gone")) == 0
    harness.run()
    assert all(isinstance(r.error, UnavailableError) for r in harness.requests.values())


def test_a_submission_that_can_not_be_read_harms_nobody() -> None:
    harness = Harness()
    neighbour = submission("y", range(6))
    broken = replace(submission("x", range(5)), past=[None])  # type: ignore[list-item]  # on purpose
    harness.engine.add(broken)
    harness.requests["x"] = Recorded()
    harness.add(neighbour)
    harness.run()
    assert isinstance(harness.requests["x"].error, InternalError)
    assert harness.tokens("y") == alone(neighbour)
