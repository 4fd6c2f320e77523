"""The window into the engine shows each block once, as it is, and what the last step computed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from pagewire_engine.block_map import (
    CACHED,
    FREE,
    HELD,
    MAX_WAITING_SHOWN,
    SHARED,
    Snapshot,
    block_states,
)
from pagewire_engine.request import RequestStatus
from pagewire_engine.stats_message import window_message
from tests.unit.engine.harness import Harness, settings, submission


def check(harness: Harness) -> Snapshot:
    """What a snapshot shows adds up, and agrees with the counters."""
    snapshot, stats = harness.engine.snapshot(), harness.engine.stats()
    states = block_states(snapshot.reference_counts, snapshot.cached_blocks)
    assert len(states) == stats.num_blocks
    assert states.count(FREE) == stats.num_free_blocks
    assert states.count(CACHED) == stats.num_cached_blocks
    for request in snapshot.requests:
        assert len(set(request.blocks())) == len(request.blocks())
    shown = {block for request in snapshot.requests for block in request.blocks() if block >= 0}
    assert shown == {block for block, state in enumerate(states) if state in (HELD, SHARED)}
    on_cpu = {~block for request in snapshot.requests for block in request.blocks() if block < 0}
    cpu_states = block_states(snapshot.cpu_reference_counts)
    assert on_cpu == {block for block, state in enumerate(cpu_states) if state != FREE}
    assert cpu_states.count(FREE) == stats.num_free_cpu_blocks
    statuses = [request.status for request in snapshot.requests]
    assert statuses.count(RequestStatus.RUNNING) == stats.num_running
    assert statuses.count(RequestStatus.SWAPPED) == stats.num_swapped
    assert statuses.count(RequestStatus.WAITING) == min(stats.num_waiting, MAX_WAITING_SHOWN)
    planned = {plan.step: plan.scheduled for plan in harness.plans}.get(snapshot.step, [])
    assert snapshot.step_tokens == [entry.num_tokens for entry in planned]
    if harness.engine._runner is None:
        assert snapshot.step == stats.step
    if harness.engine._under_way is not None:
        assert snapshot.step < stats.step
    decodes, prefills = (
        snapshot.step_tokens[: snapshot.num_decodes],
        snapshot.step_tokens[snapshot.num_decodes :],
    )
    assert sum(decodes) == stats.step_decode_tokens == len(decodes)
    assert sum(prefills) == stats.step_prefill_tokens
    return snapshot


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(6, 24),
    st.integers(2, 20),
    st.sampled_from(["auto", "swap", "recompute"]),
)
@pytest.mark.parametrize("overlaps_steps", [False, True])
@hypothesis_settings(max_examples=60)
def test_what_it_shows_adds_up_at_every_step(
    overlaps_steps: bool,
    requests: list[tuple[int, int, int, bool]],
    num_blocks: int,
    budget: int,
    mode: str,
) -> None:
    harness = Harness(
        settings(
            num_blocks=num_blocks,
            num_cpu_blocks=num_blocks // 2,
            preemption_mode=mode,
            max_num_batched_tokens=budget,
        ),
        overlaps_steps=overlaps_steps,
    )
    check(harness)
    for number, (length, n, max_tokens, abort) in enumerate(requests):
        harness.add(submission(f"r{number}", range(3, 3 + length), n=n, max_tokens=max_tokens))
        harness.step()
        check(harness)
        if abort:
            harness.engine.abort(f"r{number}", 0)
            check(harness)
    while harness.engine.has_work:
        harness.step()
        check(harness)
    harness.engine.close()


def test_a_step_s_chunks_and_decodes_are_told_by_request() -> None:
    harness = Harness(settings(max_num_batched_tokens=8))
    harness.add(submission("first", range(4)))
    harness.step()
    harness.add(submission("second", range(30)))
    harness.step()
    snapshot = check(harness)
    ids = [snapshot.requests[index].request_id for index in snapshot.step_requests]
    assert ids == ["first", "second"]
    assert (snapshot.step_tokens, snapshot.num_decodes) == ([1, 7], 1)


def test_a_swapped_request_s_blocks_are_in_host_memory() -> None:
    harness = Harness(settings(num_blocks=8, num_cpu_blocks=8, preemption_mode="swap"))
    harness.add(submission("x", range(12), max_tokens=16), submission("y", range(12, 24)))
    while not harness.engine.stats().num_swapped:
        harness.step()
    snapshot = check(harness)
    (swapped,) = [r for r in snapshot.requests if r.status is RequestStatus.SWAPPED]
    window = window_message(snapshot)
    view = window.requests[snapshot.requests.index(swapped)]
    assert len(view.cpu_blocks) >= 3
    assert not view.blocks
    assert {n for n, state in enumerate(window.cpu_blocks) if state} == set(view.cpu_blocks)
    assert len(window.cpu_blocks) == 8
    assert harness.engine.stats().num_swaps == 1
    harness.run()
    assert check(harness).cpu_reference_counts == [0] * 8


def test_blocks_kept_for_their_prefix_are_shown_as_cached() -> None:
    harness = Harness()
    harness.add(submission("x", range(9), max_tokens=1))
    harness.run()
    snapshot = check(harness)
    assert len(snapshot.cached_blocks) == 2


def test_sequences_that_share_a_prompt_share_its_blocks() -> None:
    harness = Harness()
    harness.add(submission("x", range(8), n=3))
    harness.step()
    snapshot = check(harness)
    states = block_states(snapshot.reference_counts)
    (request,) = snapshot.requests
    assert [states[block] for block in request.blocks()] == [SHARED, SHARED]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (8, 3)


def test_a_request_that_ended_with_the_step_is_still_named() -> None:
    harness = Harness()
    harness.add(submission("x", range(8), max_tokens=1))
    harness.step()
    snapshot = check(harness)
    (request,) = snapshot.requests
    assert (request.status, request.blocks()) == (RequestStatus.FINISHED, [])
    assert (snapshot.step_requests, snapshot.step_tokens) == ([0], [8])


def test_blocks_that_a_step_under_way_names_are_held_by_the_request_that_ended() -> None:
    harness = Harness(overlaps_steps=True)
    harness.add(submission("x", range(8), n=2), submission("y", range(8, 16)))
    harness.step()
    harness.step()
    harness.engine.abort("y")
    snapshot = check(harness)
    ended = snapshot.requests[-1]
    assert (ended.request_id, ended.status) == ("y", RequestStatus.FINISHED)
    assert len(ended.blocks()) >= 2
    harness.step()
    assert all(not r.blocks() for r in check(harness).requests if r.request_id == "y")
    harness.engine.close()


def test_of_a_long_queue_only_the_first_are_shown() -> None:
    harness = Harness(settings(max_num_seqs=1))
    harness.add(*(submission(f"r{i}", range(4)) for i in range(MAX_WAITING_SHOWN + 10)))
    harness.step()
    snapshot = check(harness)
    assert len(snapshot.requests) == 1 + MAX_WAITING_SHOWN
    assert snapshot.requests[1].request_id == "r1"


@pytest.mark.parametrize("count", [2, 255, 256, 5000])
def test_a_block_may_be_shared_by_any_number(count: int) -> None:
    assert list(block_states([0, 1, count, 0], [3])) == [FREE, HELD, SHARED, CACHED]


def test_the_message_tells_blocks_of_host_memory_apart() -> None:
    harness = Harness()
    harness.add(submission("x", range(8)))
    harness.step()
    snapshot = harness.engine.snapshot()
    (table,) = snapshot.requests[0].tables
    table.append(~5)
    view = window_message(snapshot).requests[0]
    assert (list(view.blocks), list(view.cpu_blocks)) == (table[:-1], [5])
