"""Masks are made while the model computes the logits that they are for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.models.base import CausalLM
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker import grammar_masks
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.grammar_masks import GrammarMasks, Masks
from pagewire_engine.worker.model_runner import ModelRunner
from pagewire_kernels.attention import load_attention_backend
from tests.fakes.fake_engine_client import byte_tokenizer
from tests.fakes.step_driver import CPU, load
from tests.fakes.tiny_models import VOCAB_SIZE

EOS = 258
PROMPT = [5, 6, 7, 8]
HELD = SamplingParams(
    temperature=2.0, structured_output=StructuredOutput(regex="[a-z]{30}"), max_tokens=40
)
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _free_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "available_cpus", lambda: torch.get_num_threads() + 1)


@pytest.fixture
def model(tiny_llama: Path) -> CausalLM:
    return load(tiny_llama)[0]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode()}
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


def _runner(model: CausalLM, compiler: GrammarCompiler) -> ModelRunner:
    return ModelRunner(
        model,
        CacheEngine(model.kv_shape, 32, 4, torch.float32, CPU),
        load_attention_backend("torch", CPU, model.kv_shape.head_dim),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        device=CPU,
        grammars=compiler,
    )


def _first_step(*rows: int) -> StepPlan:
    new = [NewSequence(row, 0, row, PROMPT, [], HELD) for row in rows]
    parts = [ScheduledSequence(row, 0, 4, 0, [2 * row, 2 * row + 1], (row,)) for row in rows]
    return StepPlan(1, new, parts)


def _tokens(runner: ModelRunner, rows: tuple[int, ...], steps: range) -> list[list[int]]:
    """The tokens of decode steps."""
    told = []
    for step in steps:
        parts = [ScheduledSequence(row, 4 + step, 1, 2, [], (row,)) for row in rows]
        told.append([t.token_id for t in runner.execute(StepPlan(2, [], parts)).sampled])
    return told


def test_neither_waits_for_the_other_to_end(
    model: CausalLM, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_masks, in_model = threading.Event(), threading.Event()
    make, forward = GrammarMasks.masks, model.forward

    def masks_beside(*args: Any) -> Masks:
        in_masks.set()
        assert in_model.wait(DEADLINE_S), "the masks were made before the forward pass"
        return make(*args)

    def forward_beside(*args: Any) -> Any:
        in_model.set()
        assert in_masks.wait(DEADLINE_S), "the masks were to be made after the forward pass"
        return forward(*args)

    monkeypatch.setattr(GrammarMasks, "masks", masks_beside)
    monkeypatch.setattr(model, "forward", forward_beside)
    result = _runner(model, compiler).execute(_first_step(1, 2))
    assert [token.sequence_id for token in result.sampled] == [1, 2]


def test_a_failed_forward_pass_leaves_no_mask_in_the_making_and_can_be_run_again(
    model: CausalLM, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_runner, runner = _runner(model, compiler), _runner(model, compiler)
    expected_runner.execute(_first_step(1, 2))
    expected = _tokens(expected_runner, (1, 2), range(3))
    runner.execute(_first_step(1, 2))
    failed, filling = threading.Event(), threading.Event()
    make = GrammarMasks.masks

    def slow_masks(*args: Any) -> Masks:
        filling.set()
        assert failed.wait(DEADLINE_S)
        masks = make(*args)
        filling.clear()
        return masks

    def broken(*args: Any) -> Any:
        assert filling.wait(DEADLINE_S)
        failed.set()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(GrammarMasks, "masks", slow_masks)
        patch.setattr(model, "forward", broken)
        with pytest.raises(MemoryError):
            _tokens(runner, (1, 2), range(1))
    assert not filling.is_set(), "a mask was being made when the step was over"
    assert _tokens(runner, (1, 2), range(3)) == expected


def test_who_is_forgotten_and_comes_again_goes_on_as_before(
    model: CausalLM, compiler: GrammarCompiler
) -> None:
    """An abort of one, and a preemption of the other, between steps."""
    expected_runner, runner = _runner(model, compiler), _runner(model, compiler)
    first = expected_runner.execute(_first_step(1, 2)).sampled
    expected = _tokens(expected_runner, (1, 2), range(3))
    runner.execute(_first_step(1, 2))
    assert _tokens(runner, (1, 2), range(1)) == expected[:1]
    past = [first[1].token_id, expected[0][1]]
    again = NewSequence(2, 0, 2, PROMPT, past, HELD)
    whole = ScheduledSequence(2, 0, len(PROMPT) + len(past), 0, [10, 11], (2,))
    result = runner.execute(StepPlan(3, [again], [whole], forgotten=[1, 2]))
    assert [token.token_id for token in result.sampled] == [expected[1][1]]


def test_what_goes_wrong_with_a_mask_fails_the_step(
    model: CausalLM, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GrammarMasks, "masks", broken)
    with pytest.raises(ZeroDivisionError):
        _runner(model, compiler).execute(_first_step(1))


def test_where_the_model_has_all_cpus_masks_come_before_it(
    model: CausalLM, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [t.token_id for t in _runner(model, compiler).execute(_first_step(1, 2, 3)).sampled]
    monkeypatch.setattr(grammar_masks, "available_cpus", torch.get_num_threads)
    order: list[tuple[str, int]] = []
    make, forward = GrammarMasks.masks, model.forward

    def masks_told(*args: Any) -> Masks:
        order.append(("masks", threading.get_native_id()))
        return make(*args)

    def forward_told(*args: Any) -> Any:
        order.append(("model", threading.get_native_id()))
        return forward(*args)

    monkeypatch.setattr(GrammarMasks, "masks", masks_told)
    monkeypatch.setattr(model, "forward", forward_told)
    result = _runner(model, compiler).execute(_first_step(1, 2, 3))
    assert [token.token_id for token in result.sampled] == expected
    here = threading.get_native_id()
    assert order == [("masks", here), ("model", here)]
