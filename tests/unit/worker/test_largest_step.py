"""The step that profiling runs needs the most memory of all steps."""

from __future__ import annotations

import pytest

from pagewire_engine.worker.largest_step import largest_step


@pytest.mark.parametrize(
    ("num_tokens", "max_num_seqs", "max_model_len"),
    [(100, 1, 10), (100, 4, 1000), (100, 256, 16), (100, 256, 1), (5, 8, 64), (100, 8, 20)],
)
def test_it_fills_the_budget_within_the_limits(
    num_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    plan = largest_step(num_tokens, max_num_seqs, max_model_len, block_size=8)
    lengths = [part.num_tokens for part in plan.scheduled]
    ends = [part.start + part.num_tokens for part in plan.scheduled]
    assert sum(lengths) == min(num_tokens, max_num_seqs * max_model_len)
    assert len(lengths) == min(max_num_seqs, num_tokens)
    assert max(ends) == max_model_len
    assert lengths == sorted(lengths), "decodes come first"
    for part, new, end in zip(plan.scheduled, plan.new_sequences, ends, strict=True):
        assert part.block_ids == [0] * -(-end // 8)
        assert len(new.prompt_token_ids) == end
        assert part.sample_for == (part.sequence_id,)


def test_prefill_and_decode_look_back_at_the_longest_context() -> None:
    plan = largest_step(100, max_num_seqs=5, max_model_len=1000, block_size=16)
    parts = [(part.start, part.num_tokens) for part in plan.scheduled]
    assert parts == [(999, 1), (0, 1), (0, 1), (0, 1), (904, 96)]
