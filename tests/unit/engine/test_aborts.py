"""A request, or one of its sequences, can be ended at any moment."""

from __future__ import annotations

import pytest

from pagewire.outputs import FinishReason
from tests.unit.engine.harness import Harness, alone, settings, submission


def test_a_waiting_request() -> None:
    harness = Harness()
    harness.add(submission("x", range(5)))
    harness.engine.abort("x")
    harness.run()
    assert harness.requests["x"].reasons == {0: FinishReason.ABORT}
    assert harness.plans == []


def test_between_chunks_of_its_prompt() -> None:
    harness = Harness(settings(max_num_batched_tokens=4))
    harness.add(submission("x", range(10)))
    harness.step()
    harness.engine.abort("x")
    harness.run()
    assert harness.requests["x"].reasons == {0: FinishReason.ABORT}
    assert len(harness.plans) == 1


def test_a_running_request_ends_within_a_step() -> None:
    harness = Harness()
    neighbour = submission("y", range(6))
    harness.add(submission("x", range(5), n=2), neighbour)
    harness.step()
    harness.engine.abort("x")
    outputs = harness.step()
    assert [o.request_id for o in outputs.sequences if o.finish_reason] == ["x", "x"]
    assert harness.requests["x"].reasons == {0: FinishReason.ABORT, 1: FinishReason.ABORT}
    harness.run()
    assert harness.tokens("y") == alone(neighbour)
    assert harness.executor.sequences.keys() <= {2}, "the worker still knows an aborted sequence"


def test_a_preempted_request() -> None:
    harness = Harness(settings(num_blocks=4))
    harness.add(submission("a", range(7)), submission("b", range(7)))
    while not harness.engine.stats().num_preemptions:
        harness.step()
    harness.engine.abort("b")
    harness.run()
    assert harness.requests["b"].reasons == {0: FinishReason.ABORT}
    assert harness.tokens("a") == alone(submission("a", range(7)))


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
def test_one_sequence_of_a_request(index: int, num_steps: int) -> None:
    """Sequence 0 computes the prompt for all: without it another goes on from where it was."""
    harness = Harness(settings(max_num_batched_tokens=4))
    request = submission("x", range(10), n=3, temperature=1.0)
    harness.add(request)
    for _ in range(num_steps):
        harness.step()
    harness.engine.abort("x", index, FinishReason.STOP)
    harness.run()
    reasons = harness.requests["x"].reasons
    assert reasons.pop(index) is FinishReason.STOP
    assert set(reasons.values()) == {FinishReason.LENGTH}
    whole = alone(request)
    for other in reasons:
        assert harness.requests["x"].tokens[other] == whole[other]
    told = harness.requests["x"].tokens.get(index, [])
    assert told == whole[index][: len(told)]
    # The prompt was not begun again.
    assert sum(entry.num_tokens for plan in harness.plans[:3] for entry in plan.scheduled) == 10


def test_the_id_can_be_used_again_at_once() -> None:
    """vllm#23697: the new request survives."""
    harness = Harness()
    harness.add(submission("x", range(5)))
    harness.step()
    harness.engine.abort("x")
    again = submission("x", range(9))
    harness.engine.add(again)
    old, new = harness.engine.step().sequences
    assert (old.finish_reason, old.start, old.token_ids) == (FinishReason.ABORT, 1, [])
    assert (new.finish_reason, new.start) == (None, 0)
    tokens = list(new.token_ids)
    while harness.engine.has_work:
        tokens += [t for o in harness.engine.step().sequences for t in o.token_ids]
    assert [tokens] == alone(again)


def test_unknown_and_ended_ids_are_no_error() -> None:
    harness = Harness()
    harness.add(submission("x", range(5)))
    harness.run()
    harness.engine.abort("x")
    harness.engine.abort("y", 3)
    assert not harness.engine.has_work


def test_twice_ends_once() -> None:
    harness = Harness()
    harness.add(submission("x", range(5), n=2))
    harness.step()
    harness.engine.abort("x", 1)
    harness.engine.abort("x", 1)
    harness.engine.abort("x")
    harness.engine.abort("x")
    harness.run()
    assert harness.engine.stats().num_requests_finished == 1
