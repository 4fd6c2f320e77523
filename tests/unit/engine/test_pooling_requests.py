"""Requests whose answer is a vector go through the same scheduler: in chunks or whole, preempted,
aborted, beside one another, and the vector is the same."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import InternalError, InvalidArgumentError
from pagewire.outputs import FinishReason
from pagewire.pooling import PoolingParams
from pagewire.sampling_params import SamplingParams
from pagewire_engine.submission import Submission
from tests.fakes.fake_executor import vector_of_crc
from tests.unit.engine.harness import Harness, settings, submission


def pooled(request_id: str, prompt: Sequence[int], **fields: Any) -> Submission:
    return Submission(
        request_id, list(prompt), SamplingParams(seed=0), pooling=PoolingParams(), **fields
    )


def vector_of(prompt: Sequence[int]) -> list[float]:
    """What the fake model makes of a prompt that was read in full through its blocks."""
    return vector_of_crc(zlib.crc32(array("q", prompt)))


def encoder_settings(**changes: Any) -> Any:
    return settings(
        **{"num_blocks": 0, "chunks_prompts": False, "enable_prefix_caching": False} | changes
    )


def ended_well(harness: Harness, prompts: dict[str, Sequence[int]]) -> None:
    for request_id, prompt in prompts.items():
        recorded = harness.requests[request_id]
        assert recorded.vector == vector_of(prompt)
        assert recorded.reasons == {0: FinishReason.STOP}
        assert recorded.tokens == {0: []}


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_prompt_in_chunks_gives_one_vector_and_no_token(overlaps: bool) -> None:
    harness = Harness(settings(max_num_batched_tokens=5), overlaps_steps=overlaps)
    prompts = {"a": range(17), "b": range(100, 103)}
    harness.add(*(pooled(*item) for item in prompts.items()))
    harness.run()
    ended_well(harness, prompts)
    stats = harness.engine.stats()
    assert stats.num_prefill_chunks > 4
    assert stats.num_generation_tokens == 0
    assert stats.num_prompt_tokens == 20
    assert not any(
        entry.start + entry.num_tokens > 17 for p in harness.plans for entry in p.scheduled
    )


def test_a_prompt_may_fill_the_context() -> None:
    harness = Harness(settings(max_model_len=32, num_blocks=8))
    harness.add(pooled("full", range(32)), pooled("over", range(33)))
    harness.run()
    ended_well(harness, {"full": range(32)})
    error = harness.requests["over"].error
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "prompt_token_ids"


def test_the_last_token_is_computed_though_all_is_cached() -> None:
    harness = Harness()
    harness.add(pooled("first", range(12)))
    harness.run()
    harness.add(pooled("again", range(12)))
    harness.run()
    ended_well(harness, {"first": range(12), "again": range(12)})
    end = harness.requests["again"].ends[0]
    assert end.times is not None
    assert end.times.cached_tokens == 8


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_vector(mode: str) -> None:
    harness = Harness(
        settings(num_blocks=10, num_cpu_blocks=16, max_num_batched_tokens=4, preemption_mode=mode)
    )
    # The answer grows into the blocks of a prompt that comes in small chunks.
    harness.add(submission("answer", range(4), max_tokens=24))
    harness.add(pooled("late", range(50, 82), priority=1))
    harness.run()
    ended_well(harness, {"late": range(50, 82)})
    assert harness.requests["late"].ends[0].times.preemptions > 0
    assert harness.engine.stats().num_swaps == (mode == "swap")


def test_an_abort_in_the_midst_of_a_prompt_ends_it_without_a_vector() -> None:
    for overlaps in (False, True):
        harness = Harness(settings(max_num_batched_tokens=4), overlaps_steps=overlaps)
        harness.add(pooled("gone", range(20)), pooled("stays", range(9)), pooled("waits", range(3)))
        harness.step()
        harness.engine.abort("gone")
        harness.engine.abort("waits")
        harness.run()
        ended_well(harness, {"stays": range(9)})
        for request_id in ("gone", "waits"):
            recorded = harness.requests[request_id]
            assert recorded.vector is None
            assert recorded.reasons == {0: FinishReason.ABORT}


def test_a_vector_that_is_not_numbers_fails_its_request_alone() -> None:
    harness = Harness()
    harness.add(pooled("bad", range(5)), pooled("good", range(7)))
    harness.executor.nan_sequences.add(0)
    harness.run()
    ended_well(harness, {"good": range(7)})
    assert isinstance(harness.requests["bad"].error, InternalError)


def test_an_encoders_prompts_are_never_parted_and_need_no_blocks() -> None:
    harness = Harness(encoder_settings(max_num_batched_tokens=16))
    prompts = {str(n): range(n * 100, n * 100 + length) for n, length in enumerate((10, 10, 4, 16))}
    harness.add(*(pooled(*item) for item in prompts.items()))
    harness.run()
    ended_well(harness, prompts)
    # The third fits beside the first, before the second, which does not.
    assert [[e.num_tokens for e in plan.scheduled] for plan in harness.plans] == [
        [10, 4],
        [10],
        [16],
    ]


@pytest.mark.parametrize("overlaps", [False, True])
def test_short_prompts_do_not_keep_a_long_one_out_for_ever(overlaps: bool) -> None:
    harness = Harness(
        encoder_settings(max_num_batched_tokens=16, max_num_seqs=4), overlaps_steps=overlaps
    )
    harness.add(pooled("short", range(3)), pooled("long", range(16)))
    for n in range(12):
        harness.add(pooled(f"more{n}", range(3)))
        harness.step()
    assert harness.requests["long"].vector == vector_of(range(16))


def test_an_encoder_refuses_what_no_step_can_hold() -> None:
    harness = Harness(encoder_settings(max_num_batched_tokens=16, max_model_len=16))
    harness.add(pooled("long", range(17)))
    harness.run()
    error = harness.requests["long"].error
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "prompt_token_ids"


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    tenants=st.lists(st.sampled_from(["", "x", "y"]), min_size=12, max_size=12),
    priorities=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    budget=st.integers(40, 64),
    chunks=st.booleans(),
    overlaps=st.booleans(),
    aborted=st.sets(st.integers(0, 11)),
)
def test_each_request_ends_once_with_its_own_vector(
    lengths: list[int],
    tenants: list[str],
    priorities: list[int],
    budget: int,
    chunks: bool,
    overlaps: bool,
    aborted: set[int],
) -> None:
    made = (
        settings(max_num_batched_tokens=budget // 8, num_blocks=14, max_model_len=48)
        if chunks
        else encoder_settings(max_num_batched_tokens=budget, max_num_seqs=3)
    )
    harness = Harness(made, overlaps_steps=overlaps)
    prompts = {n: range(n * 50, n * 50 + length) for n, length in enumerate(lengths)}
    for n, prompt in prompts.items():
        harness.add(pooled(str(n), prompt, tenant=tenants[n], priority=priorities[n]))
        harness.step()
        if n in aborted:
            harness.engine.abort(str(n // 2))
    harness.run()
    for n, prompt in prompts.items():
        recorded = harness.requests[str(n)]
        (reason,) = recorded.reasons.values()
        if reason is FinishReason.STOP:
            assert recorded.vector == vector_of(prompt)
        else:
            assert reason is FinishReason.ABORT
            assert recorded.vector is None
