"""A request that comes with what it has produced elsewhere goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason
from pagewire_engine.submission import SequencePast
from tests.unit.engine.harness import Harness, alone, settings, submission


@pytest.mark.parametrize("num_past", [0, 1, 4, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_the_same(num_past: int, temperature: float) -> None:
    request = submission("x", range(9), temperature=temperature)
    whole = alone(request)
    harness = Harness(settings(max_num_batched_tokens=4))
    harness.add(replace(request, past=[SequencePast(0, whole[0][:num_past])]))
    harness.run()
    assert harness.tokens("x") == whole
    assert harness.engine.stats().num_generation_tokens == 8 - num_past
    assert harness.engine.stats().num_prefill_chunks > 1


def test_sequences_of_different_pasts() -> None:
    request = submission("x", range(9), n=4, temperature=1.0)
    whole = alone(request)
    past = [
        SequencePast(0, whole[0][:3]),
        SequencePast(1, whole[1][:6], FinishReason.STOP),
        SequencePast(3, whole[3][:5]),
    ]
    harness = Harness(settings(max_num_batched_tokens=6))
    harness.add(replace(request, past=past))
    harness.run()
    assert harness.tokens("x") == [whole[0], whole[1][:6], whole[2], whole[3]]
    assert harness.requests["x"].reasons[1] is FinishReason.STOP
    computed = {entry.sequence_id for plan in harness.plans for entry in plan.scheduled}
    assert len(computed) == 3


def test_a_past_that_has_ended_ends_at_once() -> None:
    harness = Harness()
    past = [
        SequencePast(0, [5, 6], FinishReason.STOP, cumulative_logprob=-1.5),
        SequencePast(1, [], FinishReason.ABORT),
    ]
    harness.add(submission("x", range(9), n=2, past=past))
    assert "x" not in harness.engine
    harness.run()
    assert harness.plans == []
    assert harness.requests["x"].reasons == {0: FinishReason.STOP, 1: FinishReason.ABORT}
    assert harness.requests["x"].ends[0].cumulative_logprob == -1.5


@pytest.mark.parametrize(
    ("tokens", "reason", "stop_token_id"),
    [
        (list(range(50, 58)), FinishReason.LENGTH, None),
        ([50, 1], FinishReason.STOP, None),
        ([50, 2], FinishReason.STOP, 2),
    ],
)
def test_an_end_that_nobody_was_told_of_is_found_in_the_past(
    tokens: list[int], reason: FinishReason, stop_token_id: int | None
) -> None:
    harness = Harness()
    request = submission("x", range(9), ignore_eos=False, stop_token_ids=[2])
    harness.add(replace(request, past=[SequencePast(0, tokens)]))
    harness.run()
    assert harness.plans == []
    end = harness.requests["x"].ends[0]
    assert (end.finish_reason, end.stop_token_id, end.num_tokens) == (
        reason,
        stop_token_id,
        len(tokens),
    )


def test_log_probabilities_go_on_adding_up() -> None:
    request = submission("x", range(9), logprobs=1)
    reference = Harness()
    reference.add(request)
    reference.run()
    end = reference.requests["x"].ends[0]
    whole = reference.tokens("x")[0]
    partial = Harness()
    partial.add(request)
    for _ in range(3):
        outputs = partial.step()
    past = SequencePast(0, whole[:3], None, outputs.sequences[0].cumulative_logprob)
    harness = Harness()
    harness.add(replace(request, past=[past]))
    harness.run()
    assert harness.requests["x"].ends[0].cumulative_logprob == pytest.approx(end.cumulative_logprob)
    assert harness.requests["x"].num_logprobs == 5


@pytest.mark.parametrize("past", [[SequencePast(2, [5])], [SequencePast(0, [5])] * 2])
def test_a_past_that_makes_no_sense_is_refused(past: list[SequencePast]) -> None:
    harness = Harness()
    harness.add(submission("x", range(9), n=2, past=past))
    harness.run()
    error = harness.requests["x"].error
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "past"


def test_the_callers_lists_are_left_alone() -> None:
    tokens = [50, 51]
    harness = Harness()
    harness.add(submission("x", range(9), past=[SequencePast(0, tokens)]))
    harness.run()
    assert tokens == [50, 51]
