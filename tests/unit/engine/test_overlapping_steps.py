"""While a step is computed, the next one is scheduled; what ends meanwhile is silent at once, and
keeps its blocks until no step under way names them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pagewire.outputs import FinishReason
from pagewire_engine.step import StepPlan
from pagewire_engine.submission import SequencePast
from tests.unit.engine.harness import Harness, alone, settings, submission


class Gate:
    """Holds each step until it is let through; knows which have begun."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self.begun: list[int] = []

    def __call__(self, plan: StepPlan) -> None:
        self.begun.append(plan.step)
        assert self._steps.acquire(timeout=10)

    def open(self, steps: int) -> None:
        self._steps.release(steps)


@contextmanager
def overlapping(**changes: Any) -> Iterator[Harness]:
    harness = Harness(settings(**changes), overlaps_steps=True)
    try:
        yield harness
    finally:
        harness.engine.close()


def test_the_next_step_is_scheduled_while_one_is_computed() -> None:
    gate = Gate()
    harness = Harness(on_execute=gate, overlaps_steps=True)
    harness.add(submission("a", range(6), max_tokens=4))
    # Neither waits for a result: the first step is under way, the second behind it.
    assert not harness.step()
    first = threading.Thread(target=harness.step)
    first.start()
    gate.open(1)
    first.join(10)
    assert not first.is_alive()
    # The first token was told while the second step was computed.
    assert len(harness.tokens("a")[0]) == 1
    assert harness.engine.queues.running[0].sequences[0].num_computed_tokens == 7
    gate.open(3)
    harness.run()
    harness.engine.close()
    assert harness.tokens("a") == alone(submission("a", range(6), max_tokens=4))
    assert gate.begun == [1, 2, 3, 4]


def test_an_end_found_too_late_costs_a_token_that_nobody_hears_of() -> None:
    # With 40 tokens in the vocabulary one of these comes to its end-of-sequence id early.
    requests = [
        submission(str(n), [n, n + 1, n + 2], max_tokens=30, ignore_eos=False) for n in range(3, 15)
    ]
    whole = {r.request_id: alone(r, vocab_size=40) for r in requests}
    ended_early = [r for r in requests if len(whole[r.request_id][0]) < 30]
    assert ended_early
    harness = Harness(settings(num_blocks=256), vocab_size=40, overlaps_steps=True)
    harness.add(*requests)
    harness.run()
    harness.engine.close()
    for request in requests:
        assert harness.tokens(request.request_id) == whole[request.request_id]
    sampled = sum(len(entry.sample_for) for plan in harness.plans for entry in plan.scheduled)
    told = sum(len(tokens[0]) for tokens in whole.values())
    assert sampled == told + len(ended_early)
    assert harness.engine.stats().num_generation_tokens == told


def test_known_ends_cost_nothing() -> None:
    with overlapping() as harness:
        harness.add(
            submission("a", range(6), max_tokens=5), submission("b", [3], n=2, max_tokens=3)
        )
        harness.run()
    assert sum(len(e.sample_for) for plan in harness.plans for e in plan.scheduled) == 5 + 2 * 3


def test_an_abort_silences_at_once_and_frees_when_the_step_has_landed() -> None:
    with overlapping() as harness:
        harness.add(submission("a", range(6), max_tokens=20))
        for _ in range(4):
            harness.step()
        told = len(harness.tokens("a")[0])
        blocks = harness.engine.queues.blocks
        held = 32 - blocks.num_available_blocks
        assert held > 0
        harness.engine.abort("a")
        assert 32 - blocks.num_available_blocks == held
        outputs = harness.step()
        assert [output.finish_reason for output in outputs.sequences] == [FinishReason.ABORT]
        assert len(harness.tokens("a")[0]) == told
        assert blocks.num_available_blocks == 32
        harness.run()


def test_blocks_in_flight_are_not_given_to_others() -> None:
    """The pool has room for one: the second starts only after the step that names the first's
    blocks, though the first has ended before."""
    with overlapping(num_blocks=4, max_model_len=16) as harness:
        harness.add(submission("a", range(10), max_tokens=6))
        for _ in range(3):
            harness.step()
        harness.add(submission("b", range(20, 33), max_tokens=3))
        harness.engine.abort("a")
        harness.run()
    assert harness.tokens("b") == alone(submission("b", range(20, 33), max_tokens=3))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_waits_for_the_step_under_way(mode: str) -> None:
    requests = [
        submission(str(number), [number] * 9, max_tokens=12, temperature=1.0) for number in range(3)
    ]
    with overlapping(
        num_blocks=8, num_cpu_blocks=8, max_model_len=32, preemption_mode=mode
    ) as harness:
        harness.add(*requests)
        harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert (harness.engine.queues.num_swaps > 0) is (mode == "swap")
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_a_failed_step_takes_only_the_request_at_fault() -> None:
    def fail(plan: StepPlan) -> None:
        sequences = harness.executor.sequences
        if any(99 in sequences[e.sequence_id].new.prompt_token_ids for e in plan.scheduled):
            raise RuntimeError("poisoned")

    harness = Harness(on_execute=fail, overlaps_steps=True)
    good = [submission(str(n), range(n, n + 6), n=2, temperature=1.0) for n in range(3)]
    harness.add(*good)
    for _ in range(3):
        harness.step()
    harness.add(submission("bad", [99, 98], max_tokens=9))
    harness.run()
    harness.engine.close()
    assert harness.requests["bad"].error is not None
    for request in good:
        assert harness.tokens(request.request_id) == alone(request)


def test_the_first_sequence_of_several_may_be_aborted_while_it_computes_the_prompt() -> None:
    request = submission("a", range(10), n=3, temperature=1.0, max_tokens=6)
    for steps in range(1, 5):
        with overlapping(max_num_batched_tokens=4) as harness:
            harness.add(request)
            for _ in range(steps):
                harness.step()
            harness.engine.abort("a", 0)
            harness.run()
        tokens = harness.requests["a"].tokens
        assert [tokens[1], tokens[2]] == alone(request)[1:]


def test_a_cached_prefix_is_published_only_once_it_is_computed() -> None:
    with overlapping() as harness:
        first = submission("a", range(100, 120), max_tokens=3)
        harness.add(first)
        harness.step()
        harness.add(submission("b", range(100, 120), max_tokens=3))
        harness.step()
        harness.run()
        harness.add(submission("c", range(100, 120), max_tokens=3))
        harness.run()
    times = [harness.requests[name].ends[0].times for name in "abc"]
    cached = [each.cached_tokens for each in times if each is not None]
    # When b was scheduled, a's step was still under way.
    assert cached == [0, 0, 16]
    assert harness.tokens("a") == harness.tokens("b") == harness.tokens("c") == alone(first)


def test_a_sequence_of_a_swapped_request_may_be_aborted_under_way() -> None:
    requests = [
        submission("0", [1] * 6, max_tokens=14),
        submission("1", [2] * 6, n=2, max_tokens=14, temperature=1.0),
        submission("last", [3] * 6, n=3, max_tokens=14, temperature=1.0),
    ]
    for num_blocks, wait in itertools.product((8, 9, 10), range(8)):
        with overlapping(num_blocks=num_blocks, num_cpu_blocks=12, max_model_len=64) as harness:
            harness.add(*requests)
            while not harness.engine.queues.swapped:
                harness.step()
            for _ in range(wait):
                harness.step()
            harness.engine.abort("last", 1)
            harness.engine.abort("last", 2)
            harness.run()
        assert harness.requests["last"].tokens[0] == alone(requests[2])[0]
        # Of 8 blocks, the two sequences of this one would need 9 at their end.
        assert (harness.requests["1"].error is None) is (num_blocks > 8)
        if num_blocks > 8:
            assert harness.tokens("1") == alone(requests[1])


@pytest.mark.parametrize("past", [0, 2])
def test_a_skipped_chunk_of_an_aborted_leader_is_computed_for_the_others(past: int) -> None:
    request = submission("a", range(14), n=3, temperature=1.0, max_tokens=8)
    whole = alone(request)
    if past:
        told = [SequencePast(index, tokens[:past]) for index, tokens in enumerate(whole)]
        request = replace(request, past=told, resubmission=True)
    for failing in range(1, 5):
        failed: list[int] = []

        def fail_once(plan: StepPlan, step: int = failing, seen: list[int] = failed) -> None:
            if plan.step == step and not seen:
                seen.append(step)
                raise RuntimeError("once")

        harness = Harness(
            settings(max_num_batched_tokens=4), on_execute=fail_once, overlaps_steps=True
        )
        harness.add(request)
        while not failed:
            harness.step()
        harness.engine.abort("a", 0)
        harness.run()
        harness.engine.close()
        tokens = harness.requests["a"].tokens
        assert [tokens[1], tokens[2]] == whole[1:]


@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_logprobs_are_whole_though_the_leader_is_aborted(overlaps: bool) -> None:
    request = submission("a", range(100, 120), n=2, max_tokens=4, prompt_logprobs=1)
    for steps in range(1, 6):
        harness = Harness(settings(max_num_batched_tokens=4), overlaps_steps=overlaps)
        harness.add(request)
        for _ in range(steps):
            harness.step()
        harness.engine.abort("a", 0)
        harness.run()
        harness.engine.close()
        told = [position.token.token_id for position in harness.requests["a"].prompt_logprobs]
        assert told == list(range(101, 120))


def test_logits_that_are_no_numbers_cost_nobody_else_a_step() -> None:
    good = [submission(str(n), range(n, n + 6), max_tokens=12) for n in range(3)]
    with overlapping() as harness:
        harness.add(*good, submission("bad", [50, 51], max_tokens=12))
        for _ in range(4):
            harness.step()
        (bad,) = [r for r in harness.engine.queues.running if r.request_id == "bad"]
        harness.executor.nan_sequences.add(bad.sequences[0].sequence_id)
        harness.run()
    assert harness.requests["bad"].error is not None
    for request in good:
        assert harness.tokens(request.request_id) == alone(request)
    steps = [plan.step for plan in harness.plans]
    assert steps == sorted(set(steps)), "a plan was executed again"
