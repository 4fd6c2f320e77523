"""Sampling for several sequences, failures of one, prompt log probabilities."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pagewire.sampling_params import SamplingParams
from pagewire_engine.models.base import CausalLM
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.model_runner import ModelRunner
from pagewire_kernels.attention import load_attention_backend
from tests.fakes.step_driver import CPU, load
from tests.fakes.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, logprobs=2)


@pytest.fixture
def model(tiny_llama: Path) -> CausalLM:
    return load(tiny_llama)[0]


def _runner(model: CausalLM) -> ModelRunner:
    cache = CacheEngine(model.kv_shape, 16, 4, torch.float32, CPU)
    backend = load_attention_backend("torch", CPU, model.kv_shape.head_dim)
    return ModelRunner(model, cache, backend, vocab_size=VOCAB_SIZE, eos_token_ids=(), device=CPU)


def _new(
    sequence_id: int, prompt: list[int], params: SamplingParams, index: int = 0
) -> NewSequence:
    return NewSequence(sequence_id, index, 11, prompt, [], params)


def test_one_prompt_starts_several_sequences_that_go_different_ways(model: CausalLM) -> None:
    params = SamplingParams(n=3, temperature=2.0)
    prompt = [5, 6, 7, 8, 9, 10]
    runner = _runner(model)
    part = ScheduledSequence(1, 0, 6, 0, [3, 9], sample_for=(1, 2, 3))
    new = [_new(1 + index, prompt, params, index) for index in range(3)]
    first = runner.execute(StepPlan(1, new, [part]))
    assert [token.sequence_id for token in first.sampled] == [1, 2, 3]
    assert len({token.token_id for token in first.sampled}) > 1
    # The second and third write to copies of the last, partial block.
    decodes = [
        ScheduledSequence(1, 6, 1, 2, [], (1,)),
        ScheduledSequence(2, 6, 1, 0, [3, 10], (2,)),
        ScheduledSequence(3, 6, 1, 0, [3, 11], (3,)),
    ]
    second = runner.execute(StepPlan(2, [], decodes, block_copies=[(9, 10), (9, 11)]))
    for start, token in zip(first.sampled, second.sampled, strict=True):
        alone = _runner(model)
        past = NewSequence(1, start.sequence_id - 1, 11, prompt, [start.token_id], params)
        whole = ScheduledSequence(1, 0, 7, 0, [0, 1], (1,))
        assert alone.execute(StepPlan(1, [past], [whole])).sampled[0].token_id == token.token_id


def test_nan_fails_its_own_sequence_only(model: CausalLM) -> None:
    prompts = {1: [5, 6, 7], 2: [300, 6, 7], 3: [8, 9, 10, 11]}
    model.input_embedding().weight[300] = math.nan
    runner = _runner(model)
    parts = [ScheduledSequence(i, 0, len(prompt), 0, [i], (i,)) for i, prompt in prompts.items()]
    new = [_new(i, prompt, GREEDY) for i, prompt in prompts.items()]
    # Row 300 is the tied head's too; only the sequence that reads it may suffer for that.
    model.lm_head = type(model.lm_head)(48, VOCAB_SIZE, None)
    model.lm_head.weight.copy_(torch.randn(VOCAB_SIZE, 48))
    result = runner.execute(StepPlan(1, new, parts))
    assert [sequence_id for sequence_id, _ in result.failed] == [2]
    assert [token.sequence_id for token in result.sampled] == [1, 3]
    # A later user of the failed sequence's block must not see its NaN keys and values.
    reuse = ScheduledSequence(4, 0, 1, 0, [2], (4,))
    decode = StepPlan(2, [_new(4, [5], GREEDY)], [reuse], forgotten=[2])
    after = runner.execute(decode)
    assert not after.failed
    assert math.isfinite(after.sampled[0].logprob)


def test_a_failed_step_can_be_run_again_and_counts_once(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 6, 7, 8, 9]
    expected_runner, runner = _runner(model), _runner(model)
    plan = StepPlan(1, [_new(1, prompt, GREEDY)], [ScheduledSequence(1, 0, 5, 0, [3, 4], (1,))])
    expected = [expected_runner.execute(plan).sampled[0]]
    follow = StepPlan(2, [], [ScheduledSequence(1, 5, 1, 2, [], (1,))])
    expected.append(expected_runner.execute(follow).sampled[0])

    def broken(hidden: torch.Tensor, adapter_rows: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.execute(plan)
    rerun = StepPlan(1, [], plan.scheduled)
    assert [runner.execute(rerun).sampled[0], runner.execute(follow).sampled[0]] == expected


@pytest.mark.parametrize("chunk", [3, 100])
def test_prompt_logprobs_cover_the_prompt_once_however_it_is_chunked(
    model: CausalLM, chunk: int
) -> None:
    prompt = [(7 * i) % VOCAB_SIZE for i in range(11)]
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    runner = _runner(model)
    positions = []
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        done = start + count == len(prompt)
        part = ScheduledSequence(1, start, count, 0, [2, 5, 8], (1,) if done else ())
        new = [_new(1, prompt, params)] if start == 0 else []
        for told in runner.execute(StepPlan(start, new, [part])).prompt_logprobs:
            assert told.start == 1 + len(positions)
            positions += told.positions
    assert [position.token.token_id for position in positions] == prompt[1:]
    expected = _reference_logprobs(model, prompt)
    for row, position in enumerate(positions):
        best = expected[row].topk(2)
        assert [token.token_id for token in position.top] == best.indices.tolist()
        assert position.token.logprob == pytest.approx(
            float(expected[row, position.token.token_id]), abs=1e-4
        )


def _reference_logprobs(model: CausalLM, prompt: list[int]) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, args, hidden: rows.append(hidden.clone()))
    part = ScheduledSequence(1, 0, len(prompt), 0, [0, 1, 2], (1,))
    _runner(model).execute(StepPlan(1, [_new(1, prompt, GREEDY)], [part]))
    handle.remove()
    return model.compute_logits(rows[0]).log_softmax(-1)


def test_a_plan_that_only_forgets_runs_nothing(model: CausalLM) -> None:
    result = _runner(model).execute(StepPlan(9, forgotten=[4]))
    assert result.step == 9
    assert not result.sampled
