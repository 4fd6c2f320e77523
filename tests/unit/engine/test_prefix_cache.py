"""What one request has computed, others that begin alike need not compute again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagewire_engine.step import StepPlan
from tests.unit.engine.harness import BLOCK_SIZE, Harness, alone, settings, submission

PROMPT = list(range(100, 110))  # two blocks and a half


def computed_tokens(plans: list[StepPlan]) -> int:
    return sum(entry.num_tokens for plan in plans for entry in plan.scheduled)


def run(harness: Harness, *requests: object) -> int:
    """Runs the requests to their end; returns how many tokens were computed."""
    before = len(harness.plans)
    harness.add(*requests)  # type: ignore[arg-type]
    harness.run()
    return computed_tokens(harness.plans[before:])


def cached(harness: Harness, request_id: str) -> int:
    times = harness.requests[request_id].ends[0].times
    assert times is not None
    return times.cached_tokens


def test_the_full_blocks_of_a_prompt_are_computed_once() -> None:
    harness = Harness()
    first = submission("a", PROMPT, max_tokens=2)
    second = submission("b", [*PROMPT[:8], 5, 6, 7], max_tokens=2)
    assert run(harness, first) == 10 + 1
    assert run(harness, second) == 3 + 1
    assert (cached(harness, "a"), cached(harness, "b")) == (0, 8)
    assert harness.tokens("b") == alone(second)


def test_output_is_found_by_the_next_turn_of_a_conversation() -> None:
    harness = Harness()
    run(harness, submission("a", PROMPT, max_tokens=9))
    # Nothing was computed from the last token: 18 of 19 are there, 16 of them in full blocks.
    turn = [*PROMPT, *harness.tokens("a")[0], 1, 2]
    request = submission("b", turn, max_tokens=3)
    run(harness, request)
    assert cached(harness, "b") == 16
    assert harness.tokens("b") == alone(request)


def test_of_a_whole_hit_the_last_block_is_computed_into_a_block_of_its_own() -> None:
    harness = Harness()
    prompt = PROMPT[:8]
    first = submission("a", prompt, max_tokens=5)
    run(harness, first)
    assert run(harness, replace(first, request_id="b")) == BLOCK_SIZE + 4
    assert cached(harness, "b") == 4
    assert harness.tokens("b") == alone(first)


def test_running_requests_share_blocks() -> None:
    harness = Harness(settings(max_num_batched_tokens=64))
    harness.add(submission("a", PROMPT, max_tokens=20))
    harness.step()
    harness.add(submission("b", PROMPT, max_tokens=20))
    harness.step()
    blocks, running = harness.engine.queues.blocks, harness.engine.queues.running
    a, b = (blocks.block_table(request.sequences[0]) for request in running)
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    harness.run()
    assert (
        harness.tokens("a") == harness.tokens("b") == alone(submission("a", PROMPT, max_tokens=20))
    )


def test_other_tokens_before_a_block_make_it_another() -> None:
    harness = Harness()
    run(harness, submission("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1))
    request = submission("b", [0, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    run(harness, request)
    assert cached(harness, "b") == 0


def test_another_cache_key_shares_nothing() -> None:
    harness = Harness()
    request = submission("a", PROMPT, max_tokens=1)
    run(harness, replace(request, cache_key="adapter 1"))
    run(harness, replace(request, request_id="b", cache_key="adapter 2"))
    run(harness, replace(request, request_id="c"))
    run(harness, replace(request, request_id="d", cache_key="adapter 1"))
    assert [cached(harness, name) for name in "bcd"] == [0, 0, 8]


def test_the_least_recently_used_goes_first_and_a_prefix_goes_last() -> None:
    harness = Harness(settings(num_blocks=6, max_model_len=24))
    old, new = [1] * 9, [2] * 9
    run(harness, submission("old", old, max_tokens=1))
    run(harness, submission("new", new, max_tokens=1))
    run(harness, submission("old again", old, max_tokens=1))
    # Four blocks are known. This one needs five, so three of them go: those of `new`, and the
    # second block of `old`.
    run(harness, submission("large", [3] * 19, max_tokens=1))
    run(harness, submission("o", old, max_tokens=1))
    run(harness, submission("n", new, max_tokens=1))
    assert (cached(harness, "o"), cached(harness, "n")) == (4, 0)


def test_held_blocks_are_never_evicted() -> None:
    harness = Harness(settings(num_blocks=6, max_model_len=24))
    request = submission("a", PROMPT, max_tokens=10)
    harness.add(request, submission("b", [3] * 9, max_tokens=4), submission("c", PROMPT))
    harness.run()
    assert harness.tokens("a") == alone(request)


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_are_whole(budget: int) -> None:
    harness = Harness(settings(max_num_batched_tokens=budget))
    request = submission("a", PROMPT, max_tokens=2, prompt_logprobs=1)
    run(harness, request)
    run(harness, replace(request, request_id="b"))
    run(harness, submission("c", PROMPT, max_tokens=2))
    told = [p.token.token_id for p in harness.requests["b"].prompt_logprobs]
    assert told == PROMPT[1:]
    assert (cached(harness, "b"), cached(harness, "c")) == (0, 8)


def test_chunks_begin_behind_what_is_cached() -> None:
    harness = Harness(settings(max_num_batched_tokens=3))
    request = submission("a", range(100, 120), max_tokens=3)
    run(harness, request)
    before = len(harness.plans)
    run(harness, replace(request, request_id="b"))
    starts = [(e.start, e.num_tokens) for p in harness.plans[before:] for e in p.scheduled]
    assert starts == [(16, 3), (19, 1), (20, 1), (21, 1)]
    assert harness.tokens("b") == harness.tokens("a")


def test_several_sequences_share_a_cached_prompt() -> None:
    harness = Harness()
    request = submission("a", PROMPT, n=3, temperature=1.0, max_tokens=6)
    run(harness, request)
    assert run(harness, replace(request, request_id="b")) == 2 + 3 * 5
    assert harness.tokens("b") == harness.tokens("a") == alone(request)


def test_a_preempted_request_finds_its_own_blocks_and_tells_no_hit() -> None:
    harness = Harness(settings(num_blocks=8, max_model_len=32))
    requests = [submission(str(number), [number] * 9, max_tokens=12) for number in range(2)]
    harness.add(*requests)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert harness.engine.queues.blocks.num_tokens_hit > 0
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)
        assert cached(harness, request.request_id) == 0


def test_reset_forgets_all_and_disturbs_nobody() -> None:
    harness = Harness()
    request = submission("a", PROMPT, max_tokens=8)
    run(harness, submission("before", [5] * 9, max_tokens=1))
    harness.add(request)
    harness.step()
    assert harness.engine.reset_prefix_cache() == 4
    assert harness.engine.stats().num_cached_blocks == 0
    harness.run()
    assert harness.tokens("a") == alone(request)
    run(harness, submission("after", [5] * 9, max_tokens=1), replace(request, request_id="b"))
    assert (cached(harness, "after"), cached(harness, "b")) == (0, 0)


def test_blocks_of_a_request_that_failed_are_not_found() -> None:
    harness = Harness()
    harness.add(submission("a", PROMPT, max_tokens=8))
    harness.step()
    (sequence,) = harness.engine.queues.running[0].sequences
    harness.executor.nan_sequences.add(sequence.sequence_id)
    harness.run()
    assert harness.requests["a"].error is not None
    run(harness, submission("b", PROMPT, max_tokens=8))
    assert cached(harness, "b") == 0


def test_nothing_is_kept_where_it_is_switched_off() -> None:
    harness = Harness(settings(enable_prefix_caching=False))
    request = submission("a", PROMPT, max_tokens=8)
    run(harness, request)
    assert harness.engine.stats().num_cached_blocks == 0
    run(harness, replace(request, request_id="b"))
    assert cached(harness, "b") == 0
