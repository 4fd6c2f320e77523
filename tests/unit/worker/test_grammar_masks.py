"""What a constraint lets a sequence choose, with the rules that meet it: stops, biases, faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagewire.errors import PagewireError
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.step import NewSequence, StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.grammar_masks import GrammarMasks
from pagewire_engine.worker.sampler import Sampler, SamplingRow
from pagewire_kernels.token_masks import forbidden
from tests.fakes.fake_engine_client import byte_tokenizer, ids_of

# One token a byte, then control tokens; the model's vocabulary is padded, to no whole word.
EOS, OTHER_EOS, VOCAB_SIZE = 258, 257, 275


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode()}
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS, OTHER_EOS])
    yield compiler
    compiler.close()


@pytest.fixture
def masks(compiler: GrammarCompiler) -> GrammarMasks:
    return GrammarMasks(compiler, VOCAB_SIZE, [EOS, OTHER_EOS])


def row(
    output: str | list[int] = "", *, sequence_id: int = 1, row: int = 0, **params: Any
) -> SamplingRow:
    ids = ids_of(output) if isinstance(output, str) else output
    values: dict[str, Any] = {
        "temperature": 0.0,
        "structured_output": StructuredOutput(regex="ab+c"),
    }
    return SamplingRow(sequence_id, row, 0, 7, SamplingParams(**values | params), [1, 2], ids)


def allowed(masks: GrammarMasks, *rows: SamplingRow) -> list[set[int]]:
    """The tokens that each row may choose."""
    told = masks.masks(rows)
    assert not told.refused
    away = forbidden(told.words, VOCAB_SIZE)
    assert away.shape == (len(rows), VOCAB_SIZE)
    return [set((~away[told.rows[r.sequence_id]]).nonzero()[:, 0].tolist()) for r in rows]


def tokens(text: str) -> set[int]:
    return set(ids_of(text))


def test_a_mask_follows_the_output(masks: GrammarMasks) -> None:
    assert allowed(masks, row()) == [tokens("a")]
    assert allowed(masks, row("a")) == [tokens("b")]
    assert allowed(masks, row("abb")) == [tokens("bc")]
    assert allowed(masks, row("abbc")) == [{EOS, OTHER_EOS}]


def test_several_rows_are_as_each_alone(masks: GrammarMasks) -> None:
    outputs = ["", "a", "ab", "abbbc", "abb"]
    rows = [row(output, sequence_id=n) for n, output in enumerate(outputs)]
    alone = [allowed(masks, each)[0] for each in rows]
    again = GrammarMasks(masks._compiler, VOCAB_SIZE, [EOS])
    assert allowed(again, *rows) == alone


def test_a_sequence_that_is_introduced_anew_starts_anew(masks: GrammarMasks) -> None:
    assert allowed(masks, row("abb")) == [tokens("bc")]
    params = SamplingParams()
    masks.apply(StepPlan(2, new_sequences=[NewSequence(1, 0, 7, [1], [], params)]))
    assert allowed(masks, row("a")) == [tokens("b")]
    masks.apply(StepPlan(3, forgotten=[1]))
    assert len(masks) == 0
    assert allowed(masks, row()) == [tokens("a")]


def test_rows_without_a_constraint_have_no_mask(masks: GrammarMasks) -> None:
    told = masks.masks([row(structured_output=None), row(sequence_id=2)])
    assert set(told.rows) == {2}


@pytest.mark.parametrize("params", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_stops_before_their_time_are_chosen_only_where_nothing_else_is_left(
    masks: GrammarMasks, params: dict[str, Any]
) -> None:
    either = StructuredOutput(regex="ab?")
    assert allowed(masks, row("a", structured_output=either)) == [tokens("b") | {EOS, OTHER_EOS}]
    early = row("a", sequence_id=2, structured_output=either, **params)
    assert allowed(masks, early) == [tokens("b")]
    complete = row("ab", sequence_id=3, structured_output=either, **params)
    assert allowed(masks, complete) == [{EOS, OTHER_EOS}]


def test_a_stop_token_waits_for_min_tokens_too(masks: GrammarMasks) -> None:
    stop = [*tokens("c")]
    assert allowed(masks, row("ab", min_tokens=3, stop_token_ids=stop)) == [tokens("b")]
    only = StructuredOutput(regex="abc")
    left = row("ab", sequence_id=2, min_tokens=5, stop_token_ids=stop, structured_output=only)
    assert allowed(masks, left) == [tokens("c")]


def test_no_bias_and_no_penalty_gets_past_a_mask(masks: GrammarMasks) -> None:
    (x,), (b,), (c,) = ids_of("x"), ids_of("b"), ids_of("c")
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, b] = 5.0
    rows = [
        row("ab", logit_bias={x: 100.0}, presence_penalty=-2.0),
        row("ab", sequence_id=2, row=1, logit_bias={b: -100.0, x: 100.0}),
    ]
    sampler = Sampler(VOCAB_SIZE, [EOS, OTHER_EOS], "cpu")
    sampled, failed = sampler.sample(logits, rows, masks.masks(rows))
    assert not failed
    assert [token.token_id for token in sampled] == [b, c]
    assert logits.abs().sum() == 10.0, "the logits are as they were"


def test_log_probabilities_stay_the_models_own(masks: GrammarMasks) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = [row("ab", logprobs=1)]
    sampled, _ = Sampler(VOCAB_SIZE, [EOS], "cpu").sample(logits, rows, masks.masks(rows))
    assert sampled[0].logprob == pytest.approx(
        float(logits[0].log_softmax(-1)[sampled[0].token_id]), abs=1e-5
    )


def test_neighbours_do_not_change_a_sampled_token(masks: GrammarMasks) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    any_text = StructuredOutput(regex="[a-z]{1,40}")
    rows = [
        row("q", sequence_id=0, row=0, temperature=1.0, structured_output=any_text),
        row("q", sequence_id=1, row=1, temperature=1.0, structured_output=None),
        row("ab", sequence_id=2, row=2, temperature=1.0),
        row("qq", sequence_id=3, row=3, temperature=1.0, min_tokens=7, structured_output=None),
    ]
    sampler = Sampler(VOCAB_SIZE, [EOS, OTHER_EOS], "cpu")
    together, _ = sampler.sample(logits, rows, masks.masks(rows))
    alone = [sampler.sample(logits, [each], masks.masks([each]))[0][0] for each in rows]
    assert [t.token_id for t in together] == [t.token_id for t in alone]


def test_an_output_that_does_not_fit_is_refused_alone(masks: GrammarMasks) -> None:
    rows = [row("abx", sequence_id=1), row("ab", sequence_id=2, row=1)]
    told = masks.masks(rows)
    assert [sequence_id for sequence_id, _ in told.refused] == [1]
    assert told.less_refused(rows) == rows[1:]
    sampled, failed = Sampler(VOCAB_SIZE, [EOS], "cpu").sample(
        torch.zeros(2, VOCAB_SIZE), told.less_refused(rows), told
    )
    assert not failed
    assert sampled[0].token_id in tokens("bc")


def test_what_comes_after_the_end_hurts_nothing(masks: GrammarMasks) -> None:
    """A step under way may run a sequence on past its end."""
    for output in ([*ids_of("abc"), EOS], [*ids_of("abc"), OTHER_EOS, EOS, 0]):
        masks.apply(StepPlan(1, forgotten=[1]))
        masks.masks([row(output), row("ab", sequence_id=2)])
        assert allowed(masks, row("ab", sequence_id=2)) == [tokens("bc")]


def test_without_a_tokenizer_a_constraint_is_refused_not_ignored() -> None:
    compiler = GrammarCompiler(dict, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    told = GrammarMasks(compiler, VOCAB_SIZE, [EOS]).masks([row()])
    assert not told.rows
    assert told.refused[0][0] == 1
    with pytest.raises(PagewireError, match="skip-tokenizer-init"):
        compiler.matcher(StructuredOutput(regex="a"))
