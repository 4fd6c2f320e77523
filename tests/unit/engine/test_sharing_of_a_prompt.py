"""n sequences of a prompt share its blocks: it is computed once, and a block is copied only where
one writes what others read."""

from __future__ import annotations

import pytest

from tests.unit.engine.harness import Harness, alone, settings, submission


@pytest.mark.parametrize(
    ("num_prompt_tokens", "n", "copies"),
    [
        (10, 1, 0),
        # The prompt's last block is half full: all but the last writer copy it.
        (10, 2, 1),
        (10, 4, 3),
        # It ends with its block: each writes to a new one.
        (8, 4, 0),
    ],
)
def test_each_sequence_but_one_copies_the_block_it_writes_to(
    num_prompt_tokens: int, n: int, copies: int
) -> None:
    harness = Harness()
    harness.add(submission("x", range(num_prompt_tokens), n=n, temperature=1.0))
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_block_copies == copies
    assert sum(len(plan.block_copies) for plan in harness.plans) == copies
    computed = sum(part.num_tokens for plan in harness.plans for part in plan.scheduled)
    assert computed == num_prompt_tokens + n * 7, "the prompt once, and all but the last tokens"


def test_the_last_to_go_on_copies_nothing() -> None:
    harness = Harness()
    harness.add(submission("x", range(10), n=3, temperature=1.0))
    harness.step()
    for index in (0, 2):
        harness.engine.abort("x", index)
    harness.run()
    assert harness.engine.stats().num_block_copies == 0


def test_shared_blocks_are_held_once() -> None:
    harness = Harness()
    harness.add(submission("x", range(18), n=5, temperature=1.0))
    harness.step()
    harness.step()
    stats = harness.engine.stats()
    # Four full blocks of prompt, and five copies of the one in which the prompt ends.
    assert stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks == 4 + 5


def test_a_copy_is_counted_again_after_a_preemption() -> None:
    harness = Harness(settings(num_blocks=9, max_num_batched_tokens=16))
    requests = [
        submission(str(i), range(i, i + 6), n=2, temperature=0.7, seed=i, max_tokens=9)
        for i in range(3)
    ]
    harness.add(*requests)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_block_copies > len(requests)
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)
