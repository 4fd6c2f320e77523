"""Requests that are told of at their end: the same tokens, in one piece a sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagewire.outputs import FinishReason
from pagewire_engine.submission import SequencePast
from tests.unit.engine.harness import EOS, Harness, alone, settings, submission


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_each_sequence_is_told_once_and_whole(overlaps_steps: bool) -> None:
    request = submission("whole", range(10, 20), n=3, temperature=1.0, max_tokens=9)
    small = settings(num_blocks=12, max_num_batched_tokens=8)
    harness = Harness(small, overlaps_steps=overlaps_steps)
    harness.add(replace(request, told_at_end=True), submission("stream", range(30, 45)))
    told = []
    while harness.engine.has_work:
        told += [one for one in harness.step().sequences if one.request_id == "whole"]
    assert sorted(one.sequence_index for one in told) == [0, 1, 2]
    assert all(one.start == 0 and one.finish_reason is FinishReason.LENGTH for one in told)
    assert harness.tokens("whole") == alone(request)
    assert len(harness.tokens("stream")[0]) == 8


def test_an_abort_tells_what_there_was_and_a_stop_its_reason() -> None:
    harness = Harness(vocab_size=8)
    stopping = submission("stops", [3, 4, 5], ignore_eos=False, max_tokens=60)
    harness.add(replace(stopping, told_at_end=True))
    harness.add(replace(submission("aborted", [6, 7], max_tokens=100), told_at_end=True))
    for _ in range(5):
        harness.step()
    harness.engine.abort("aborted")
    harness.run()
    assert harness.requests["aborted"].reasons[0] is FinishReason.ABORT
    assert len(harness.tokens("aborted")[0]) == 5
    assert harness.requests["stops"].reasons[0] is FinishReason.STOP
    assert harness.tokens("stops")[0][-1] == EOS
    assert harness.tokens("stops") == alone(stopping, vocab_size=8)


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="log probabilities"):
        replace(submission("a", [1], logprobs=1), told_at_end=True)
    with pytest.raises(ValueError, match="past"):
        replace(submission("a", [1], past=[SequencePast(0, [5])]), told_at_end=True)
