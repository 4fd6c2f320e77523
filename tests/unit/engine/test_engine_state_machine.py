"""Requests come, run short of blocks, are aborted, fail and come back in any order: each answers as
if it were alone (DESIGN invariants 1, 2, 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagewire.beam_search_params import BeamSearchParams, EarlyStopping
from pagewire.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
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

    @property
    def poisoned(self) -> bool:
        return POISON in self.request.prompt_token_ids


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 10),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(3, 8),
        watermark=st.sampled_from([0.0, 0.25]),
        num_cpu_blocks=st.sampled_from([0, 3, 20]),
        preemption_mode=st.sampled_from(["auto", "recompute", "swap"]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        overlaps_steps=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        watermark: float,
        num_cpu_blocks: int,
        preemption_mode: str,
        enable_prefix_caching: bool,
        overlaps_steps: bool,
    ) -> None:
        self.harness = Harness(
            settings(
                num_blocks=num_blocks,
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_model_len=40,
                watermark=watermark,
                num_cpu_blocks=num_cpu_blocks,
                preemption_mode=preemption_mode,
                enable_prefix_caching=enable_prefix_caching,
            ),
            vocab_size=VOCAB_SIZE,
            on_execute=self.fail_if_poisoned,
            overlaps_steps=overlaps_steps,
        )
        self.fail_next_step = False
        self.failed_steps: set[int] = set()
        self.expected: dict[str, Expected] = {}

    def fail_if_poisoned(self, plan: StepPlan) -> None:
        if self.fail_next_step and plan.step not in self.failed_steps:
            self.failed_steps.add(plan.step)
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
    )
    def add_more_than_fits(self, prompts: list[list[int]], tenant: str, temperature: float) -> None:
        for prompt in prompts:
            request_id = str(len(self.expected))
            request = submission(
                request_id, prompt, tenant=tenant, max_tokens=12, temperature=temperature
            )
            self.harness.add(request)
            self.expected[request_id] = Expected(request)

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
        blocks = self.harness.engine.scheduler.blocks
        blocks.reset_prefix_cache()
        assert blocks.num_cached_blocks == 0

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @rule()
    def fail_a_step_once(self) -> None:
        self.fail_next_step = True
        self.harness.step()
        self.fail_next_step = False

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
        for request_id, expected in self.expected.items():
            self.check(expected, self.harness.requests[request_id])
        # The worker forgets the last ones with the next plan.
        forgotten = self.harness.engine.scheduler._forgotten
        assert self.harness.executor.sequences.keys() == set(forgotten)
        self.harness.engine.close()

    def check(self, expected: Expected, recorded: Recorded) -> None:
        request, error = expected.request, recorded.error
        whole = reference(request)
        for index, tokens in recorded.tokens.items():
            assert tokens == whole[index][: len(tokens)]
        if isinstance(error, InvalidArgumentError):
            assert self.is_too_large(request)
        elif isinstance(error, InternalError):
            assert expected.poisoned
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


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis_settings(max_examples=50, stateful_step_count=40)
