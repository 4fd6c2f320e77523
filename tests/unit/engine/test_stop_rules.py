"""What ends a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.outputs import FinishReason
from pagewire_engine.engine import Engine
from pagewire_engine.outputs import SequenceOutput
from pagewire_engine.step import SampledToken, StepPlan, StepResult
from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.harness import EOS, settings, submission


class ScriptedExecutor(FakeExecutor):
    """Answers with a script, position by position."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script = script

    def execute(self, plan: StepPlan) -> StepResult:
        lengths = {i: len(s.output_token_ids) for i, s in self.sequences.items()}
        result = super().execute(plan)
        sampled = [
            SampledToken(t.sequence_id, self.script[lengths.get(t.sequence_id, 0)], t.logprob)
            for t in result.sampled
        ]
        return StepResult(plan.step, sampled)


def last_output(script: list[int], **params: Any) -> SequenceOutput:
    engine = Engine(ScriptedExecutor(script), eos_token_ids=[EOS, 9], settings=settings())
    engine.add(submission("x", range(20, 25), **({"ignore_eos": False} | params)))
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step().sequences
    return outputs[-1]


@pytest.mark.parametrize(
    ("script", "params", "num_tokens", "reason", "stop_token_id"),
    [
        ([5, 6, EOS, 7], {}, 3, FinishReason.STOP, None),
        ([5, 9, 7, 7], {}, 2, FinishReason.STOP, None),
        ([5, EOS, 6, 7], {"max_tokens": 4, "ignore_eos": True}, 4, FinishReason.LENGTH, None),
        ([5, 6, 7, 8], {"stop_token_ids": [7, 8]}, 3, FinishReason.STOP, 7),
        ([5, EOS, 7], {"stop_token_ids": [EOS]}, 2, FinishReason.STOP, None),
        ([5, EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, 2, FinishReason.STOP, EOS),
        ([5, 6, 7], {"max_tokens": 2}, 2, FinishReason.LENGTH, None),
        ([5, EOS], {"max_tokens": 2}, 2, FinishReason.STOP, None),
        ([EOS, EOS, 5, EOS], {"min_tokens": 3}, 4, FinishReason.STOP, None),
        ([7, 7, 5, 7], {"min_tokens": 3, "stop_token_ids": [7]}, 4, FinishReason.STOP, 7),
        ([EOS, EOS], {"min_tokens": 2, "max_tokens": 2}, 2, FinishReason.STOP, None),
        ([5] * 200, {"max_tokens": None}, 123, FinishReason.LENGTH, None),  # the context of 128
        ([EOS] * 200, {"max_tokens": None, "min_tokens": 500}, 123, FinishReason.LENGTH, None),
    ],
)
def test_a_sequence_ends(
    script: list[int],
    params: dict[str, Any],
    num_tokens: int,
    reason: FinishReason,
    stop_token_id: int | None,
) -> None:
    last = last_output(script, **params)
    assert last.num_tokens == num_tokens
    assert last.finish_reason is reason
    assert last.stop_token_id == stop_token_id
    assert last.token_ids == [script[num_tokens - 1]]
