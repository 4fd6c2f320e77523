"""Preemption by swap: blocks go to host memory, and come back before any new prompt starts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagewire.outputs import FinishReason
from tests.unit.engine.harness import Harness, alone, settings, submission


def crowded(**changes: Any) -> Harness:
    """Three requests that do not fit together, `last` being the one that has to go."""
    values: dict[str, Any] = {"num_blocks": 12, "num_cpu_blocks": 12, "max_model_len": 64}
    harness = Harness(settings(**(values | changes)))
    harness.add(*requests())
    return harness


def requests() -> list[Any]:
    return [
        submission("0", [1] * 6, max_tokens=14),
        submission("1", [2] * 6, n=2, max_tokens=14, temperature=1.0),
        submission("last", [3] * 6, n=2, max_tokens=14, temperature=1.0),
    ]


def check_answers(harness: Harness) -> None:
    for request in requests():
        assert harness.tokens(request.request_id) == alone(request)


def test_groups_are_swapped_and_answer_as_if_alone() -> None:
    harness = crowded()
    harness.run()
    queues = harness.engine.queues
    assert queues.num_swaps > 0
    moved_out = sum(len(plan.swap_out) for plan in harness.plans)
    assert moved_out == sum(len(plan.swap_in) for plan in harness.plans) > 0
    check_answers(harness)


@pytest.mark.parametrize(("mode", "swaps"), [("swap", True), ("recompute", False), ("auto", False)])
def test_single_sequences_are_swapped_where_that_is_asked_for(mode: str, swaps: bool) -> None:
    harness = Harness(
        settings(num_blocks=8, num_cpu_blocks=8, max_model_len=32, preemption_mode=mode)
    )
    ours = [submission(str(number), [number] * 9, max_tokens=12) for number in range(3)]
    harness.add(*ours)
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert (harness.engine.queues.num_swaps > 0) is swaps
    for request in ours:
        assert harness.tokens(request.request_id) == alone(request)


def test_swapped_tokens_are_not_computed_again() -> None:
    harness = Harness(
        settings(num_blocks=8, num_cpu_blocks=8, max_model_len=32, preemption_mode="swap")
    )
    harness.add(*(submission(str(number), [number] * 9, max_tokens=12) for number in range(3)))
    harness.run()
    computed = sum(entry.num_tokens for plan in harness.plans for entry in plan.scheduled)
    assert computed == 3 * (9 + 11)


def test_without_room_in_host_memory_it_is_recomputed() -> None:
    harness = crowded(num_cpu_blocks=1)
    harness.run()
    assert harness.engine.queues.num_swaps == 0
    assert harness.engine.stats().num_preemptions > 0
    check_answers(harness)


def until_swapped(harness: Harness) -> None:
    while not harness.engine.queues.swapped:
        harness.step()


def test_while_anything_is_swapped_no_prompt_starts() -> None:
    harness = crowded()
    until_swapped(harness)
    harness.add(submission("small", [9], max_tokens=1, priority=-1))
    while harness.engine.queues.swapped:
        assert "small" not in {r.request_id for r in harness.engine.queues.running}
        harness.step()
    harness.run()
    check_answers(harness)
    assert len(harness.tokens("small")[0]) == 1


@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_swapped_request_can_be_aborted(index: int | None) -> None:
    harness = crowded()
    until_swapped(harness)
    harness.engine.abort("last", index)
    harness.run()
    aborted = {0, 1} if index is None else {index}
    recorded = harness.requests["last"]
    for each, reason in recorded.reasons.items():
        assert reason is (FinishReason.ABORT if each in aborted else FinishReason.LENGTH)
        whole = alone(requests()[2])[each]
        tokens = recorded.tokens[each]
        assert tokens == (whole[: len(tokens)] if each in aborted else whole)


def test_blocks_that_others_hold_stay() -> None:
    """Two groups share a cached prompt: what the second one swaps out is its own alone."""
    harness = Harness(settings(num_blocks=11, num_cpu_blocks=12, max_model_len=64))
    prompt = [1] * 9
    first = submission("0", prompt, n=2, max_tokens=16, temperature=1.0)
    second = submission("1", prompt, n=2, max_tokens=16, temperature=1.0, seed=8)
    harness.add(first)
    harness.step()
    harness.add(second)
    until_swapped(harness)
    blocks = harness.engine.queues.blocks
    (swapped,) = harness.engine.queues.swapped
    tables = [blocks.block_table(sequence) for sequence in swapped.live]
    assert all(table[:2] == tables[0][:2] and min(table[:2]) >= 0 for table in tables)
    assert all(block < 0 for table in tables for block in table[2:])
    harness.run()
    assert (harness.tokens("0"), harness.tokens("1")) == (alone(first), alone(second))


def test_operators_are_told_how_often_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    harness = crowded()
    with caplog.at_level(logging.WARNING):
        harness.run()
    (message,) = [r.getMessage() for r in caplog.records if "preempted" in r.getMessage()]
    assert "is preempted by swap because there are not enough free KV blocks" in message
    assert "--kv-cache-memory" in message
    assert message.endswith("Preemptions since start: 1.")


def test_the_fifty_first_preemption_is_worth_another_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness(settings(num_blocks=12, num_cpu_blocks=12, max_model_len=64))
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            if harness.engine.stats().num_preemptions > 50:
                break
            harness.add(submission(str(number), [number] * 6, n=2, max_tokens=14, temperature=1.0))
            for _ in range(8):
                harness.step()
    messages = [r.getMessage() for r in caplog.records if "preempted" in r.getMessage()]
    told = [message.partition("Preemptions since start: ")[2] for message in messages]
    assert told == ["1.", "51."]
    assert harness.engine.stats().num_swaps > 0


def test_fifty_sequences_are_recomputed_where_host_memory_is_full_of_others() -> None:
    """vllm#787: the group finds no room to be swapped to, and neither it nor the engine is lost."""
    harness = Harness(settings(num_blocks=152, num_cpu_blocks=12, max_num_seqs=64))
    pair = submission("pair", [5] * 9, n=2, max_tokens=30, temperature=1.0, priority=2)
    many = submission("many", [6] * 6, n=50, max_tokens=8, temperature=1.0, priority=1)
    urgent = submission("urgent", range(10, 31), max_tokens=60)
    harness.add(pair, many, urgent)
    queues = harness.engine.queues
    harness.step()
    while harness.engine.has_work and not queues.waiting:
        harness.step()
    assert [request.request_id for request in queues.swapped] == ["pair"]
    assert 0 < queues.blocks.num_free_cpu_blocks < 12
    assert [request.request_id for request in queues.waiting] == ["many"]
    harness.run()
    for request in (pair, many, urgent):
        assert harness.tokens(request.request_id) == alone(request)


def test_what_is_swapped_comes_back_before_any_chunk_of_a_new_prompt() -> None:
    """vllm#5578, with a newcomer whose prompt takes several steps."""
    harness = crowded(max_num_batched_tokens=8)
    until_swapped(harness)
    (swapped,) = harness.engine.queues.swapped
    away = {sequence.sequence_id for sequence in swapped.live}
    newcomer = submission("newcomer", range(20, 36), max_tokens=2, priority=-1)
    harness.add(newcomer)
    first = len(harness.plans)
    harness.run()
    ids = [{entry.sequence_id for entry in plan.scheduled} for plan in harness.plans[first:]]
    newcomer_id = max(max(each, default=0) for each in ids)
    comes_back = next(number for number, each in enumerate(ids) if away & each)
    chunks = [number for number, each in enumerate(ids) if newcomer_id in each]
    assert comes_back <= chunks[0]
    assert len(chunks) >= 3
    check_answers(harness)
    assert harness.tokens("newcomer") == alone(newcomer)
