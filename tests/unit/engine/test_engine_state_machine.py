"""Requests come, run short of blocks, are aborted, fail and come back in any order: each answers as
if it were alone (DESIGN invariants 1, 2, 4 and 5)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagewire.beam_search_params import BeamSearchParams, EarlyStopping
from pagewire.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.step import StepPlan
from pagewire_engine.submission import SequencePast, Submission
from tests.unit.engine.harness import BLOCK_SIZE, Harness, Recorded, alone, settings, submission

# Small, so that hashes hit the end-of-sequence id and the stop id often.
VOCAB_SIZE = 40
STOP_ID = 2
POISON = 39
# Most begin like others: they share cached blocks.
BEGINNINGS: tuple[list[int], ...] = ([], [7] * 4, [7] * 9, [7] * 4 + [8] * 5, list(range(10, 18)))
TENANTS = st.sampled_from(["", "a", "b"])
PROMPTS = st.builds(
    lambda beginning, rest: (beginning + rest)[:14],
    st.sampled_from(BEGINNINGS),
    st.lists(st.integers(3, 38), min_size=1, max_size=14),
)


@dataclass
class Expected:
    """A request, and what was done to it."""

    request: Submission
    aborted: set[int] = field(default_factory=set)
    not_a_number: bool = False
    all_failed: bool = False

    @property
    def poisoned(self) -> bool:
        return POISON in self.request.prompt_token_ids


# What the examples of all machines made happen.
reached: Counter[str] = Counter()
QUEUE_TIME_S = 60.0


class EngineMachine(RuleBasedStateMachine):
    preemption_mode = "recompute"
    overlaps_steps = False

    @initialize(
        num_blocks=st.integers(4, 10),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(3, 8),
        watermark=st.sampled_from([0.0, 0.25]),
        num_cpu_blocks=st.sampled_from([20, 20, 3, 0]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        watermark: float,
        num_cpu_blocks: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.now = 0.0
        self.harness = Harness(
            settings(
                num_blocks=num_blocks,
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_model_len=40,
                watermark=watermark,
                num_cpu_blocks=num_cpu_blocks,
                preemption_mode=self.preemption_mode,
                enable_prefix_caching=enable_prefix_caching,
                max_queue_time_s=QUEUE_TIME_S,
            ),
            vocab_size=VOCAB_SIZE,
            on_execute=self.fail_if_poisoned,
            overlaps_steps=self.overlaps_steps,
            clock=lambda: self.now,
        )
        cache = self.harness.engine.queues.blocks._cache
        evict = cache.evict

        def counted() -> int:
            reached["evictions"] += 1
            return evict()

        cache.evict = counted  # type: ignore[method-assign]
        self.fail_next_step = False
        self.tried_steps: set[int] = set()
        self.expected: dict[str, Expected] = {}

    def fail_if_poisoned(self, plan: StepPlan) -> None:
        is_new = plan.step not in self.tried_steps
        self.tried_steps.add(plan.step)
        if self.fail_next_step and is_new:
            raise RuntimeError("once")
        for entry in plan.scheduled:
            if POISON in self.harness.executor.sequences[entry.sequence_id].new.prompt_token_ids:
                raise RuntimeError("poisoned")

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        priority=st.integers(0, 2),
        tenant=TENANTS,
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 1),
        prompt_logprobs=st.sampled_from([None, 1]),
        poison=st.sampled_from([False] * 7 + [True]),
        past=st.lists(st.integers(0, 12), min_size=3, max_size=3),
        has_past=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        temperature: float,
        seed: int,
        priority: int,
        tenant: str,
        ignore_eos: bool,
        min_tokens: int,
        prompt_logprobs: int | None,
        poison: bool,
        past: list[int],
        has_past: bool,
    ) -> None:
        request = submission(
            str(len(self.expected)),
            [POISON, *prompt] if poison else prompt,
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            priority=priority,
            tenant=tenant,
            ignore_eos=ignore_eos,
            stop_token_ids=[STOP_ID],
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        if has_past:
            request = replace(request, past=past_of(request, past[:n]), resubmission=True)
        self.harness.add(request)
        self.expected[request.request_id] = Expected(request)

    @rule(
        prompts=st.lists(PROMPTS, min_size=2, max_size=4),
        tenant=TENANTS,
        temperature=st.sampled_from([0.0, 1.0]),
        n=st.sampled_from([2, 1]),
    )
    def add_more_than_fits(
        self, prompts: list[list[int]], tenant: str, temperature: float, n: int
    ) -> None:
        for prompt in prompts:
            request_id = str(len(self.expected))
            request = submission(
                request_id, prompt, tenant=tenant, max_tokens=12, temperature=temperature, n=n
            )
            self.harness.add(request)
            self.expected[request_id] = Expected(request)
        self.step(6)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        """A request that was there before finds what is left of its prompt."""
        request = self.expected[data.draw(st.sampled_from(sorted(self.expected)))].request
        request = replace(request, request_id=str(len(self.expected)))
        self.harness.add(request)
        self.expected[request.request_id] = Expected(request)

    @rule(
        prompt=PROMPTS,
        beam_width=st.integers(1, 4),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        length_penalty=st.sampled_from([-0.5, 0.0, 1.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
    )
    def add_beams(
        self,
        prompt: list[int],
        beam_width: int,
        n: int,
        max_tokens: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        ignore_eos: bool,
        priority: int,
    ) -> None:
        params = BeamSearchParams(
            beam_width=beam_width,
            n=min(n, beam_width),
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=ignore_eos,
        )
        request = Submission(
            str(len(self.expected)), prompt, params.as_sampling_params(), priority=priority
        )
        self.harness.add(request)
        self.expected[request.request_id] = Expected(request)

    @rule()
    def reset_prefix_cache(self) -> None:
        reached["blocks forgotten"] += self.harness.engine.reset_prefix_cache()
        assert self.harness.engine.stats().num_cached_blocks == 0

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @rule()
    def fail_a_step_once(self) -> None:
        self.fail_next_step = True
        self.harness.step()
        self.fail_next_step = False

    @rule()
    def wait_too_long(self) -> None:
        self.now += QUEUE_TIME_S + 1
        self.harness.step()
        assert self.harness.engine.queues.waiting.oldest() is None

    @rule(do=st.sampled_from([False, False, False, True]))
    def fail_all(self, do: bool) -> None:
        if not do:
            return
        live = [each for each in self.expected if each in self.harness.engine]
        assert self.harness.engine.fail_all(UnavailableError("for a test")) == len(live)
        for request_id in live:
            assert request_id not in self.harness.engine
            self.expected[request_id].all_failed = True

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), index=st.integers(0, 3))
    def compute_what_is_not_a_number(self, data: st.DataObject, index: int) -> None:
        # What is drawn must not depend on how far a step under way has come.
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        queues = self.harness.engine.queues
        queued = (*queues.waiting, *queues.running, *queues.swapped)
        request = next((each for each in queued if each.request_id == request_id), None)
        if request is None:
            return
        self.expected[request_id].not_a_number = True
        sequence = request.live[index % len(request.live)]
        self.harness.executor.nan_sequences.add(sequence.sequence_id)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        expected = self.expected[request_id]
        num_sequences = expected.request.sampling_params.n
        index = data.draw(st.sampled_from([None, *range(num_sequences)]))
        self.harness.engine.abort(request_id, index)
        expected.aborted |= set(range(num_sequences)) if index is None else {index}

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        stats = self.harness.engine.stats()
        reached[f"{self.preemption_mode}: preemptions"] += stats.num_preemptions
        reached[f"{self.preemption_mode}: swaps"] += stats.num_swaps
        reached["hits"] += stats.prefix_cache_hits
        reached["block copies"] += stats.num_block_copies
        reached["beam forks"] += stats.num_beam_forks
        for request_id, expected in self.expected.items():
            self.check(expected, self.harness.requests[request_id])
        # The worker forgets the last ones with the next plan.
        forgotten = self.harness.engine.queues._forgotten
        assert self.harness.executor.sequences.keys() == set(forgotten)
        self.harness.engine.close()

    def check(self, expected: Expected, recorded: Recorded) -> None:
        request, error = expected.request, recorded.error
        if error is not None:
            reached[type(error).__name__] += 1
        whole = reference(request)
        for index, tokens in recorded.tokens.items():
            assert tokens == whole[index][: len(tokens)]
        if isinstance(error, InvalidArgumentError):
            assert self.is_too_large(request)
        elif isinstance(error, InternalError):
            assert expected.poisoned or expected.not_a_number
        elif isinstance(error, UnavailableError):
            assert expected.all_failed
        elif isinstance(error, DeadlineExceededError):
            assert not any(recorded.tokens.values()), "it had started"
        elif isinstance(error, ResourceExhaustedError):
            assert self.most_blocks(whole, request) > self.harness.settings.num_blocks
        else:
            assert error is None
            self.check_ends(expected, recorded, whole)

    def check_ends(self, expected: Expected, recorded: Recorded, whole: list[list[int]]) -> None:
        params = expected.request.sampling_params
        assert set(recorded.reasons) == set(range(params.n)), "not every sequence has ended"
        for index, reason in recorded.reasons.items():
            if reason is FinishReason.ABORT:
                assert index in expected.aborted
            else:
                assert recorded.tokens[index] == whole[index]
                assert not expected.poisoned or expected.request.past
        if params.prompt_logprobs is not None and not (expected.aborted or expected.request.past):
            told = [position.token.token_id for position in recorded.prompt_logprobs]
            assert told == expected.request.prompt_token_ids[1:]

    def is_too_large(self, request: Submission) -> bool:
        """Its prompt and past alone, and one token more, do not fit."""
        past = max((len(p.output_token_ids) for p in request.past), default=0)
        return (
            most_sequences(request) > self.harness.settings.max_num_seqs
            or len(request.prompt_token_ids) + past + 1
            > self.harness.settings.num_blocks * BLOCK_SIZE
        )

    def most_blocks(self, whole: list[list[int]], request: Submission) -> int:
        """Blocks it holds when all of its sequences are at their longest."""
        num_prompt_tokens = len(request.prompt_token_ids)
        shared = num_prompt_tokens // BLOCK_SIZE
        lengths = [num_prompt_tokens + len(tokens) - 1 for tokens in whole]
        if request.sampling_params.beam_search is not None:
            # Beams that are not told may be as long as any.
            longest = num_prompt_tokens + (request.sampling_params.max_tokens or 0) - 1
            lengths = [longest] * most_sequences(request)
        return shared + sum(-(-length // BLOCK_SIZE) - shared for length in lengths)


def most_sequences(request: Submission) -> int:
    """Sequences it runs at a time."""
    params = request.sampling_params
    return params.n if params.beam_search is None else params.beam_search.beam_width


_references: dict[tuple[str, str], list[list[int]]] = {}


def reference(request: Submission) -> list[list[int]]:
    """What the request answers alone, from its prompt on."""
    key = (repr(request.prompt_token_ids), repr(request.sampling_params))
    if key not in _references:
        _references[key] = alone(replace(request, past=[]), vocab_size=VOCAB_SIZE)
    return _references[key]


def past_of(request: Submission, lengths: list[int]) -> list[SequencePast]:
    """The first tokens of each sequence, as another engine would have told them."""
    past = []
    for index, (tokens, length) in enumerate(zip(reference(request), lengths, strict=True)):
        # Every other end was lost with the engine that found it.
        told = FinishReason.STOP if length >= len(tokens) and index % 2 == 0 else None
        past.append(SequencePast(index, tokens[:length], told))
    return past


MODES = [("auto", False), ("auto", True), ("swap", False), ("swap", True), ("recompute", True)]


@pytest.mark.parametrize(("mode", "overlaps_steps"), MODES)
def test_each_request_answers_as_if_alone(mode: str, overlaps_steps: bool) -> None:
    class Machine(EngineMachine):
        pass

    Machine.preemption_mode, Machine.overlaps_steps = mode, overlaps_steps
    run_state_machine_as_test(
        Machine, settings=hypothesis_settings(max_examples=12, stateful_step_count=40)
    )
    reached["machines"] += 1


def test_the_machines_reached_what_they_are_for() -> None:
    if reached["machines"] < len(MODES):
        pytest.skip("not all of the machines have run")
    for what in (
        "auto: swaps",
        "swap: swaps",
        "recompute: preemptions",
        "hits",
        "block copies",
        "beam forks",
        "blocks forgotten",
        "evictions",
        "InternalError",
        "UnavailableError",
        "DeadlineExceededError",
    ):
        assert reached[what] > 0, f"{what}: {reached}"
