"""Scheduling never changes the answer: the real model's tokens are the same however they were
computed, and each test shows by the engine's counters that its path was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire.outputs import FinishReason, PositionLogprobs
from pagewire.sampling_params import SamplingParams
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.queues import SchedulerSettings
from pagewire_engine.stats import EngineStats
from pagewire_engine.submission import SequencePast, Submission
from pagewire_kernels import build

BLOCK_SIZE = 16
NUM_BLOCKS = 96
NEW_TOKENS = 18

# Token ids of unlike lengths; any ids of the vocabulary will do for this.
PROMPTS = [[(17 * i * i + 31 * i + 7 * n) % 40000 + 20 for i in range(n)] for n in (5, 33, 64, 90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=200,
    seed=1234,
    frequency_penalty=0.3,
    max_tokens=NEW_TOKENS,
    ignore_eos=True,
)
TOLD = replace(SEEDED, logprobs=3, prompt_logprobs=2)
# Whatever changes a greedy token changes the odds of a seeded one as well.
BOTH = pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, marks=pytest.mark.slow), SEEDED], ids=["greedy", "seeded"]
)
# In chunks, and in one piece.
BUDGETS = pytest.mark.parametrize("budget", [23, pytest.param(512, marks=pytest.mark.slow)])

Answers = dict[tuple[str, int], list[int]]
# Of each sequence's tokens and of each request's prompt: bit by bit, ranks and alternatives too.
Logprobs = dict[tuple[str, int] | str, list[PositionLogprobs]]


class Laboratory:
    """The model loaded once; each `run` is an engine of its own around it."""

    def __init__(self, model: Path) -> None:
        # With the C++ kernels a row's result has the same bits whatever else is in its batch.
        self.rows_are_alike = build.find_compiler() is not None
        if self.rows_are_alike:
            build.build()
        config = EngineConfig(
            model=str(model),
            device="cpu",
            attention_backend="cpu" if self.rows_are_alike else "torch",
            num_gpu_blocks_override=NUM_BLOCKS,
            max_model_len=1024,
            swap_space=64 << 20,
        )
        files = resolve_model(config)
        self.eos_token_ids = load_description(files, config).eos_token_ids
        self.executor = SingleProcessExecutor(config, files)

    def engine(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        budget: int = 512,
        overlaps_steps: bool = False,
        **more: Any,
    ) -> Engine:
        settings = SchedulerSettings(
            max_num_seqs=16,
            max_num_batched_tokens=budget,
            max_model_len=512,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            **more,
        )
        return Engine(
            self.executor,
            eos_token_ids=self.eos_token_ids,
            settings=settings,
            overlaps_steps=overlaps_steps,
        )

    def run(self, submissions: list[Submission], **limits: Any) -> tuple[Answers, EngineStats]:
        """Runs to the end in an engine of its own; see `run_in`."""
        return self.run_in(self.engine(**limits), submissions)

    def run_in(
        self, engine: Engine, submissions: list[Submission], logprobs: Logprobs | None = None
    ) -> tuple[Answers, EngineStats]:
        """Runs to the end; checks the pool after each step and the contiguity of all deltas.
        `logprobs` takes all log probabilities that are told."""
        for submission in submissions:
            engine.add(submission)
        starts = {
            (s.request_id, past.index): len(past.output_token_ids)
            for s in submissions
            for past in s.past
        }
        answers: Answers = {}
        while engine.has_work:
            outputs = engine.step()
            engine.queues.blocks.check()
            assert not outputs.failures
            for output in outputs.sequences:
                key = (output.request_id, output.sequence_index)
                tokens = answers.setdefault(key, [])
                assert output.start == starts.get(key, 0) + len(tokens)
                tokens += output.token_ids
                assert output.finish_reason in (None, FinishReason.LENGTH)
                if logprobs is not None and output.logprobs is not None:
                    logprobs.setdefault(key, []).extend(output.logprobs)
            for told in outputs.prompt_logprobs:
                assert logprobs is not None
                positions = logprobs.setdefault(told.request_id, [])
                assert told.start == len(positions) + 1
                positions += told.positions
        stats = engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        return answers, stats


@pytest.fixture(scope="module")
def laboratory(smollm2_path: Path) -> Iterator[Laboratory]:
    laboratory = Laboratory(smollm2_path)
    yield laboratory
    laboratory.executor.shutdown()


@pytest.fixture(scope="module")
def alone(laboratory: Laboratory) -> Mapping[str, Answers]:
    """Each request with the engine for itself, its prompt in one piece."""
    answers: dict[str, Answers] = {}
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        answers[name] = {}
        for submission in requests(params):
            answer, stats = laboratory.run([submission])
            assert stats.num_prefill_chunks == 1
            assert stats.num_preemptions == 0
            answers[name] |= answer
    return answers


@pytest.fixture(scope="module")
def lone_logprobs(laboratory: Laboratory) -> Logprobs:
    """What each request is told of its prompt and its tokens when it has the engine for itself."""
    told: Logprobs = {}
    for submission in requests(TOLD):
        laboratory.run_in(laboratory.engine(), [submission], told)
    return told


def requests(params: SamplingParams) -> list[Submission]:
    return [Submission(str(len(prompt)), prompt, params) for prompt in PROMPTS]


def expected(alone: Mapping[str, Answers], params: SamplingParams) -> Answers:
    return alone["greedy" if params.greedy else "seeded"]


def test_sampling_follows_the_seed(laboratory: Laboratory, alone: Mapping[str, Answers]) -> None:
    assert alone["greedy"] != alone["seeded"]
    other = SamplingParams(temperature=0.9, seed=99, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers, _ = laboratory.run(requests(other))
    assert answers != alone["seeded"]


@BOTH
def test_batched_equals_alone(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams
) -> None:
    answers, stats = laboratory.run(requests(params))
    assert answers == expected(alone, params)
    # All prompts in the first step, then all decodes together.
    assert stats.step == NEW_TOKENS
    assert stats.step_decode_tokens == len(PROMPTS)


@BOTH
def test_chunked_prefill_equals_whole(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams
) -> None:
    answers, stats = laboratory.run(requests(params), budget=23)
    assert answers == expected(alone, params)
    assert stats.num_prefill_chunks > len(PROMPTS)


@BOTH
def test_preempted_by_recompute_equals_undisturbed(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams
) -> None:
    answers, stats = laboratory.run(requests(params), num_blocks=14)
    assert answers == expected(alone, params)
    assert stats.num_preemptions > 0


@BOTH
def test_swapped_equals_undisturbed(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams
) -> None:
    engine = laboratory.engine(num_blocks=14, num_cpu_blocks=20, preemption_mode="swap")
    answers, stats = laboratory.run_in(engine, requests(params))
    assert answers == expected(alone, params)
    assert stats.num_preemptions == engine.queues.num_swaps > 0


@BOTH
@BUDGETS
def test_cached_equals_computed(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams, budget: int
) -> None:
    engine = laboratory.engine(budget=budget)
    laboratory.run_in(engine, requests(GREEDY))
    assert engine.queues.blocks.num_tokens_hit == 0
    answers, _ = laboratory.run_in(engine, requests(params))
    assert answers == expected(alone, params)
    # Of 33, 64 and 90 tokens, as many as are in full blocks; the last one is always computed.
    assert engine.queues.blocks.num_tokens_hit == 32 + 48 + 80


@BOTH
def test_overlapping_steps_equal_single_ones(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams
) -> None:
    engine = laboratory.engine(num_blocks=14, budget=40, overlaps_steps=True)
    answers, stats = laboratory.run_in(engine, requests(params))
    engine.close()
    assert answers == expected(alone, params)
    assert stats.num_overlapped_steps > NEW_TOKENS
    assert stats.num_preemptions > 0
    assert stats.num_prefill_chunks > len(PROMPTS)


@BOTH
def test_resumed_in_another_engine_equals_undisturbed(
    laboratory: Laboratory, alone: Mapping[str, Answers], params: SamplingParams
) -> None:
    whole = expected(alone, params)
    for cut in (1, NEW_TOKENS - 1):
        resumed = [
            Submission(
                submission.request_id,
                submission.prompt_token_ids,
                params,
                past=[SequencePast(0, whole[submission.request_id, 0][:cut])],
                resubmission=True,
            )
            for submission in requests(params)
        ]
        answers, stats = laboratory.run(resumed)
        assert answers == {key: tokens[cut:] for key, tokens in whole.items()}
        assert stats.num_generation_tokens == len(whole) * (NEW_TOKENS - cut)


def test_n_sequences_share_the_prompt_and_equal_themselves_under_preemption(
    laboratory: Laboratory,
) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
    submissions = [Submission(str(len(prompt)), prompt, params) for prompt in PROMPTS[:3]]
    roomy, roomy_stats = laboratory.run(submissions)
    assert roomy_stats.num_preemptions == 0
    # The prompts are computed once in one step, all nine sequences decode in the others; of 5, 33
    # and 64 tokens the last block is shared and written to, but for the 64 that end with a block.
    lengths = [len(prompt) for prompt in PROMPTS[:3]]
    assert roomy_stats.iteration_tokens.sum == sum(lengths) + 9 * (NEW_TOKENS - 1)
    assert roomy_stats.num_block_copies == 2 + 2
    assert len({tuple(tokens) for tokens in roomy.values()}) == 9
    tight, stats = laboratory.run(submissions, num_blocks=17, budget=64)
    assert tight == roomy
    assert stats.num_preemptions > 0
    # The first sequence draws what it would draw if it were the only one.
    single = SamplingParams(temperature=0.9, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
    lone, _ = laboratory.run([Submission("33", PROMPTS[1], single)])
    assert lone["33", 0] == roomy["33", 0]


def test_a_group_that_shares_its_prompt_is_swapped_whole_and_goes_on_as_if_it_had_stayed(
    laboratory: Laboratory,
) -> None:
    params = SamplingParams(
        n=3, temperature=0.9, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2
    )
    submissions = [Submission(str(len(prompt)), prompt, params) for prompt in PROMPTS[:3]]
    undisturbed: Logprobs = {}
    roomy, stats = laboratory.run_in(laboratory.engine(), submissions, undisturbed)
    assert stats.num_preemptions == 0
    disturbed: Logprobs = {}
    # The mode is auto: these groups share blocks, so they are swapped and not recomputed.
    engine = laboratory.engine(num_blocks=17, budget=64, num_cpu_blocks=24)
    tight, stats = laboratory.run_in(engine, submissions, disturbed)
    assert stats.num_swaps > 0
    assert tight == roomy
    assert disturbed == undisturbed


@pytest.mark.parametrize(
    ("way", "limits"),
    [
        ("batched", {}),
        ("chunked", {"budget": 23}),
        ("swapped", {"num_blocks": 14, "num_cpu_blocks": 20, "preemption_mode": "swap"}),
        ("overlapped", {"overlaps_steps": True}),
    ],
)
def test_raw_log_probabilities_are_the_same_bit_by_bit(
    laboratory: Laboratory, lone_logprobs: Logprobs, way: str, limits: dict[str, Any]
) -> None:
    """vllm#9453: with temperature and top_p, and constant under batching."""
    if not laboratory.rows_are_alike:
        pytest.skip("plain torch rounds a row by what else is in its batch")
    told: Logprobs = {}
    engine = laboratory.engine(**limits)
    _, stats = laboratory.run_in(engine, requests(TOLD), told)
    engine.close()
    assert told == lone_logprobs
    ran = {
        "batched": stats.step_decode_tokens == len(PROMPTS),
        "chunked": stats.num_prefill_chunks > len(PROMPTS),
        "swapped": stats.num_preemptions == stats.num_swaps > 0,
        "overlapped": stats.num_overlapped_steps > 0,
    }
    assert ran[way]


def test_what_is_computed_again_has_the_same_log_probabilities_but_for_the_last_bits(
    laboratory: Laboratory, lone_logprobs: Logprobs
) -> None:
    # A token's keys and values come from a chunk's kernels then, and no longer from a decode's.
    told: Logprobs = {}
    _, stats = laboratory.run_in(laboratory.engine(num_blocks=14), requests(TOLD), told)
    assert stats.num_preemptions > stats.num_swaps == 0
    assert told.keys() == lone_logprobs.keys()
    for key, positions in told.items():
        tokens = [position.token for position in positions]
        alone = [position.token for position in lone_logprobs[key]]
        assert [token.token_id for token in tokens] == [token.token_id for token in alone]
        for token, other in zip(tokens, alone, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-3)


@BUDGETS
def test_prompt_log_probabilities_are_whole_though_the_prefix_is_cached(
    laboratory: Laboratory, lone_logprobs: Logprobs, budget: int
) -> None:
    """vllm#3251: a full-length list, of the same numbers, and its neighbours still find the
    prefix."""
    engine = laboratory.engine(budget=budget)
    laboratory.run_in(engine, requests(GREEDY))
    told: Logprobs = {}
    laboratory.run_in(engine, requests(TOLD), told)
    for prompt in PROMPTS:
        positions, whole = told[str(len(prompt))], lone_logprobs[str(len(prompt))]
        assert [position.token.token_id for position in positions] == prompt[1:]
        for position, other in zip(positions, whole, strict=True):
            assert position.token.logprob == pytest.approx(other.token.logprob, abs=1e-3)
    assert engine.stats().prefix_cache_hits == 0
    laboratory.run_in(engine, requests(GREEDY))
    assert engine.stats().prefix_cache_hits == 32 + 48 + 80


def test_abort_at_every_step_returns_every_block(laboratory: Laboratory) -> None:
    for steps_before in range(6):
        engine = laboratory.engine(budget=40)
        for submission in requests(GREEDY):
            engine.add(submission)
        for _ in range(steps_before):
            engine.step()
        for submission in requests(GREEDY):
            engine.abort(submission.request_id)
        ends = [o for o in engine.step().sequences if o.finish_reason is FinishReason.ABORT]
        assert sorted(o.request_id for o in ends) == sorted(r.request_id for r in requests(GREEDY))
        assert not engine.has_work
        engine.queues.blocks.check()
        assert engine.queues.blocks.num_available_blocks == NUM_BLOCKS
