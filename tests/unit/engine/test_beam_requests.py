"""Beam searches in the engine: beams share blocks, fork by reference, and their answers are the
same in company, in chunks and after preemption."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.beam_search_params import BeamSearchParams
from pagewire.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from pagewire.outputs import FinishReason
from pagewire_engine.submission import Submission
from tests.unit.engine.harness import EOS, Harness, alone, settings, submission


def beams(request_id: str, prompt: range, **params: Any) -> Submission:
    """Three beams and all of them told, ten tokens, unless told otherwise."""
    values: dict[str, Any] = {"beam_width": 3, "max_tokens": 10, "ignore_eos": True}
    return Submission(
        request_id, list(prompt), BeamSearchParams(**(values | params)).as_sampling_params()
    )


def test_results_come_whole_at_the_end_best_first() -> None:
    harness = Harness()
    harness.add(beams("x", range(10), n=2))
    told = []
    while harness.engine.has_work:
        told.append(len(harness.step().sequences))
    assert told[-1] == 2
    assert not any(told[:-1])
    first, second = (harness.requests["x"].ends[index] for index in range(2))
    assert (len(first.token_ids), first.start, first.num_tokens) == (10, 0, 10)
    assert first.cumulative_logprob > second.cumulative_logprob
    assert first.token_ids != second.token_ids
    assert harness.requests["x"].reasons == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
    stats = harness.engine.stats()
    assert stats.num_generation_tokens == 20
    assert (stats.num_prompt_tokens, stats.num_requests_finished) == (10, 1)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_nothing_is_computed_twice() -> None:
    """A fork takes its parent's blocks along; only the block it writes to is copied."""
    harness = Harness()
    harness.add(beams("x", range(10)))
    harness.run()
    computed = sum(part.num_tokens for plan in harness.plans for part in plan.scheduled)
    # The prompt, and nine of ten tokens of each beam: nothing is computed from the last.
    assert computed == 10 + 9 * 3
    stats = harness.engine.stats()
    assert stats.num_beam_forks > 2
    assert 0 < stats.num_block_copies <= stats.num_beam_forks
    copies = sum(len(plan.block_copies) for plan in harness.plans)
    assert copies == stats.num_block_copies


def test_beams_share_the_blocks_of_their_common_past() -> None:
    harness = Harness()
    harness.add(beams("x", range(16), beam_width=4))
    harness.step()
    harness.step()
    queues = harness.engine.queues
    tables = [queues.blocks.block_table(beam) for beam in queues.running[0].live]
    assert len(tables) == 4
    assert all(table[:4] == tables[0][:4] for table in tables), "the prompt is there once"
    stats = harness.engine.stats()
    assert stats.num_blocks - stats.num_free_blocks == len({b for table in tables for b in table})
    assert stats.num_block_copies == 0, "the prompt ends with its block: nothing to copy"


def test_the_worker_is_told_of_forks_alone() -> None:
    """A beam that goes on is told its token; only a fork is told its whole past."""
    harness = Harness()
    harness.add(beams("x", range(6)))
    harness.run()
    stats = harness.engine.stats()
    introduced = sum(len(plan.new_sequences) for plan in harness.plans)
    assert introduced == 1 + stats.num_beam_forks
    assert sum(len(plan.appended) for plan in harness.plans) == 9 * 3 - stats.num_beam_forks
    assert len(harness.executor.sequences) <= 3, "dropped beams are forgotten"


def test_company_and_chunks_change_nothing() -> None:
    requests = [beams("a", range(23)), beams("b", range(5, 20), beam_width=4, n=1)]
    harness = Harness(settings(num_blocks=128, max_num_batched_tokens=7))
    others = [submission(str(i), range(i, i + 9), n=2, temperature=1.0) for i in range(3)]
    harness.add(requests[0], *others, requests[1])
    harness.run()
    assert harness.engine.stats().num_prefill_chunks > 5
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_fewer_tokens_a_step_than_beams() -> None:
    """Beams come to choose in different steps, and wait for one another."""
    harness = Harness(settings(max_num_batched_tokens=2))
    request = beams("x", range(9), beam_width=5)
    harness.add(request)
    harness.run()
    assert max(len(plan.scheduled) for plan in harness.plans) == 2
    assert harness.tokens("x") == alone(request)


@pytest.mark.parametrize("budget", [8, 32])
def test_preempted_beams_answer_as_if_alone(budget: int) -> None:
    harness = Harness(settings(num_blocks=17, max_num_batched_tokens=budget))
    requests = [beams(str(i), range(i, i + 9), max_tokens=24) for i in range(4)]
    harness.add(*requests)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_beam_forks > 0
    for request in requests:
        assert harness.requests[request.request_id].error is None
        assert harness.tokens(request.request_id) == alone(request)


def test_preempted_beams_share_their_prompt_again() -> None:
    harness = Harness(
        settings(num_blocks=12, max_num_batched_tokens=32, enable_prefix_caching=False)
    )
    harness.add(submission("first", range(8), max_tokens=30))
    harness.step()
    request = beams("beams", range(20), max_tokens=6)
    harness.add(request)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    # Unshared, the prompts alone would take 15 of the 12 blocks.
    assert harness.requests["beams"].error is None
    assert harness.tokens("beams") == alone(request)


def test_swapped_beams_go_on_as_if_nothing_had_been() -> None:
    harness = Harness(settings(num_blocks=17, max_num_batched_tokens=32, num_cpu_blocks=64))
    requests = [beams(str(i), range(i, i + 9), max_tokens=24) for i in range(4)]
    harness.add(*requests)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_swaps > 0
    assert stats.num_beam_forks > 0
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_more_beams_than_tokens_a_step_come_back_from_host_memory() -> None:
    harness = Harness(settings(num_blocks=10, max_num_batched_tokens=2, num_cpu_blocks=64))
    request = beams("x", range(9), max_tokens=8)
    harness.add(submission("first", range(4), max_tokens=30), request)
    harness.run()
    assert harness.engine.stats().num_swaps > 0
    assert harness.tokens("x") == alone(request)


def test_beams_start_from_a_cached_prompt() -> None:
    harness = Harness()
    harness.add(submission("first", range(17)))
    harness.run()
    request = beams("x", range(17))
    harness.add(request)
    harness.run()
    assert harness.requests["x"].ends[0].times is not None
    assert harness.requests["x"].ends[0].times.cached_tokens == 16
    assert harness.tokens("x") == alone(request)


def test_an_end_of_sequence_ends_a_beam_and_not_the_search() -> None:
    """With a small vocabulary the fake model ends sequences often."""
    for seed in range(8):
        harness = Harness(vocab_size=24)
        harness.add(beams("x", range(seed, seed + 7), ignore_eos=False, max_tokens=30))
        harness.run()
        ended = harness.requests["x"].ends
        assert set(ended) == {0, 1, 2}
        for output in ended.values():
            assert EOS not in output.token_ids[:-1]
            stopped = output.token_ids[-1] == EOS
            assert stopped == (output.finish_reason is FinishReason.STOP)
            assert stopped or len(output.token_ids) == 30


def test_logprobs_are_told_where_asked_for() -> None:
    harness = Harness()
    harness.add(beams("x", range(7), logprobs=2), beams("y", range(7)))
    harness.run()
    assert harness.tokens("x") == harness.tokens("y")
    for output in harness.requests["x"].ends.values():
        assert output.logprobs is not None
        assert [p.token.token_id for p in output.logprobs] == output.token_ids
        assert all(len(p.top) == 2 and p.top[0].rank == 1 for p in output.logprobs)
        total = sum(p.token.logprob for p in output.logprobs)
        assert total == pytest.approx(output.cumulative_logprob)
    assert all(output.logprobs is None for output in harness.requests["y"].ends.values())


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abort_ends_all_results_and_frees_the_blocks(steps: int) -> None:
    harness = Harness()
    harness.add(beams("x", range(10), n=2))
    for _ in range(steps):
        harness.step()
    harness.engine.abort("x", 0)
    assert "x" in harness.engine, "one result can't be aborted: it is none yet"
    harness.engine.abort("x")
    harness.run()
    assert harness.requests["x"].reasons == {0: FinishReason.ABORT, 1: FinishReason.ABORT}
    request = submission("next", range(5))
    harness.add(request)
    harness.run()
    assert harness.tokens("next") == alone(request)
    assert not set(harness.executor.sequences) - {max(harness.executor.sequences)}


def test_a_beam_whose_numbers_are_wrong_fails_its_request_alone() -> None:
    harness = Harness()
    harness.add(beams("x", range(6)), beams("y", range(6)))
    for _ in range(3):
        harness.step()
    victim = harness.engine.queues.running[0].live[1]
    harness.executor.nan_sequences.add(victim.sequence_id)
    # It may be dropped before it computes again; whoever takes its place may not.
    harness.executor.nan_sequences.update(range(victim.sequence_id + 1, 1000, 2))
    harness.run()
    assert isinstance(harness.requests["x"].error, InternalError)


def test_a_step_that_raises_does_not_change_the_answer() -> None:
    """The plan's forks and tokens are remembered; what is tried again is computed once more."""
    failing = {3, 5}

    def on_execute(plan: Any) -> None:
        if plan.step in failing:
            failing.discard(plan.step)
            raise RuntimeError("as a kernel would")

    harness = Harness(on_execute=on_execute)
    requests = [beams("x", range(10)), beams("y", range(3, 9))]
    harness.add(*requests)
    harness.run()
    assert not failing
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_more_beams_than_the_engine_runs_are_refused_by_name() -> None:
    harness = Harness(settings(max_num_seqs=4))
    harness.add(beams("x", range(4), beam_width=5, n=1))
    harness.step()
    error = harness.requests["x"].error
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "beam_width"
    assert "max_num_seqs=4" in error.message


def test_room_is_kept_for_the_beams_that_are_to_come() -> None:
    harness = Harness(settings(max_num_seqs=4))
    harness.add(beams("x", range(4)), submission("y", range(4), n=2))
    harness.step()
    assert harness.engine.stats().num_waiting == 1
    harness.run()
    assert harness.tokens("y") == alone(submission("y", range(4), n=2))


def test_beams_that_outgrow_the_pool_alone_fail_with_advice() -> None:
    harness = Harness(settings(num_blocks=6))
    harness.add(beams("x", range(6), max_tokens=60))
    harness.run(max_steps=200)
    error = harness.requests["x"].error
    assert isinstance(error, ResourceExhaustedError)
    assert "kv-cache-memory" in str(error)
