"""The sampler's own work: penalties, bias, min_tokens, log probabilities and failed rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.sampling_params import SamplingParams
from pagewire_engine.worker.grammar_masks import Masks
from pagewire_engine.worker.sampler import Sampler, SamplingRow, prompt_logprobs
from pagewire_kernels.sampling import TokenChooser
from tests.unit.sampling import naive

VOCAB = 331
EOS = 2
_QUIET = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def sampler(chooser: TokenChooser) -> Sampler:
    sampler = Sampler(VOCAB, [EOS], "cpu")
    sampler._chooser = chooser
    return sampler


def row(index: int, params: SamplingParams, **values: Any) -> SamplingRow:
    defaults: dict[str, Any] = {
        "sequence_id": 100 + index,
        "row": index,
        "sequence_index": 0,
        "seed": 7 + index,
        "params": params,
        "prompt_token_ids": [1, 5, 9, 5],
        "output_token_ids": [],
    }
    return SamplingRow(**{**defaults, **values})


def make_logits(seed: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def naive_logits(logits: torch.Tensor, row: SamplingRow) -> list[float]:
    """Penalties, then bias, then min_tokens, spelled out over the whole vocabulary."""
    params, values = row.params, logits[row.row].clone()
    counts = Counter(row.output_token_ids)
    for token_id in range(VOCAB):
        value = values[token_id]
        if token_id in counts or token_id in row.prompt_token_ids:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = counts[token_id]
        value = value - (params.frequency_penalty * count + params.presence_penalty * (count > 0))
        values[token_id] = value + params.logit_bias.get(token_id, 0.0)
    if len(row.output_token_ids) < params.min_tokens:
        for token_id in (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))):
            values[token_id] = -math.inf
    result: list[float] = values.tolist()
    return result


def any_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1e-5]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, -1, 1, 40, VOCAB, 10 * VOCAB]),
        min_p=st.sampled_from([0.0, 0.1]),
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
        logit_bias=st.sampled_from([{}, {3: 4.0, 5: -100.0}, {200: 100.0}]),
        min_tokens=st.sampled_from([0, 2, 50]),
        stop_token_ids=st.sampled_from([(), (4, 200)]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 0, 3]),
    )


@_QUIET
@given(
    seed=st.integers(0, 1000),
    params=st.lists(any_params(), min_size=1, max_size=6),
    outputs=st.lists(st.integers(0, VOCAB - 1), max_size=12),
)
def test_equals_a_naive_reference_and_is_the_same_alone(
    sampler: Sampler, seed: int, params: list[SamplingParams], outputs: list[int]
) -> None:
    logits = make_logits(seed, len(params))
    untouched = logits.clone()
    rows = [row(i, p, output_token_ids=outputs[i:]) for i, p in enumerate(params)]
    sampled, failed = sampler.sample(logits, rows)
    assert not failed
    assert torch.equal(logits, untouched)
    for i, (member, got) in enumerate(zip(rows, sampled, strict=True)):
        assert got.sequence_id == member.sequence_id
        top_k = member.params.top_k
        assert got.token_id == naive.choose(
            naive_logits(logits, member),
            member.params.temperature,
            member.params.min_p,
            top_k if 0 < top_k < VOCAB else VOCAB,
            member.params.top_p,
            member.seed,
            member.sequence_index,
            len(member.output_token_ids),
        )
        alone, _ = sampler.sample(
            logits[i : i + 1], [row(i, params[i], row=0, output_token_ids=outputs[i:])]
        )
        if member.params.logprobs is None:
            assert got.logprobs is None
            assert math.isnan(got.logprob)
            assert alone[0].token_id == got.token_id
        else:
            assert alone == [got]  # log probabilities included, to the last bit


def test_sequences_of_one_request_share_a_row_and_differ_by_index(sampler: Sampler) -> None:
    logits = make_logits(1, 2) * 0.1
    params = SamplingParams(n=40)
    rows = [row(i, params, row=1, seed=3, sequence_index=i) for i in range(40)]
    sampled, _ = sampler.sample(logits, rows)
    assert len({token.token_id for token in sampled}) > 20
    again, _ = sampler.sample(logits, rows[17:18])
    assert again[0].token_id == sampled[17].token_id


def test_a_resumed_sequence_draws_what_it_would_have_drawn(sampler: Sampler) -> None:
    """The noise depends on the output position alone, not on the tokens or steps before."""
    logits = make_logits(2, 1)
    once, _ = sampler.sample(logits, [row(0, SamplingParams(), output_token_ids=[4, 4, 4])])
    other = row(0, SamplingParams(), sequence_id=5, output_token_ids=[9, 8, 7])
    for _ in range(3):
        sampler.sample(make_logits(3, 1), [row(0, SamplingParams())])
    again, _ = sampler.sample(logits, [other])
    assert again[0].token_id == once[0].token_id


def test_min_tokens_suspends_eos_and_stop_tokens_until_reached(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 7], logits[0, 11] = 9.0, 8.0, 1.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    chosen = [
        sampler.sample(logits, [row(0, params, output_token_ids=[11] * done)])[0][0].token_id
        for done in range(4)
    ]
    assert chosen == [11, 11, EOS, EOS]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert sampler.sample(logits, [row(0, ignoring)])[0][0].token_id == EOS


def test_logprobs_are_raw_and_ranked(sampler: Sampler) -> None:
    logits = make_logits(4, 1)
    params = SamplingParams(
        temperature=0.3, top_p=0.5, logit_bias={42: 100.0}, repetition_penalty=1.5, logprobs=20
    )
    sampled, _ = sampler.sample(logits, [row(0, params)])
    token = sampled[0]
    assert token.token_id == 42
    raw = logits[0].double().log_softmax(-1)
    assert token.logprobs is not None
    assert token.logprob == token.logprobs.token.logprob == pytest.approx(raw[42].item(), abs=1e-5)
    assert token.logprobs.token.rank == 1 + int((logits[0] > logits[0, 42]).sum())
    expected = sorted(range(VOCAB), key=lambda i: -logits[0, i].item())[:20]
    assert [top.token_id for top in token.logprobs.top] == expected
    assert [top.rank for top in token.logprobs.top] == list(range(1, 21))
    assert [top.logprob for top in token.logprobs.top] == pytest.approx(
        raw[expected].tolist(), abs=1e-5
    )


def test_ranks_in_a_tie_are_those_of_the_listing(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 300] = 1.0
    params = SamplingParams(temperature=0.0, logit_bias={12: 50.0}, logprobs=15)
    described = sampler.sample(logits, [row(0, params)])[0][0].logprobs
    assert described is not None
    assert described.token.rank == 14
    assert [top.token_id for top in described.top] == [300, *range(14)]
    assert described.top[13] == described.token


def test_zero_logprobs_names_no_alternatives(sampler: Sampler) -> None:
    params = [SamplingParams(logprobs=0), SamplingParams(logprobs=4), SamplingParams()]
    sampled, _ = sampler.sample(make_logits(5, 3), [row(i, p) for i, p in enumerate(params)])
    assert [None if s.logprobs is None else len(s.logprobs.top) for s in sampled] == [0, 4, None]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)])
@pytest.mark.parametrize(
    ("fault", "why"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
def test_a_faulty_row_fails_alone(
    sampler: Sampler, params: SamplingParams, fault: float, why: str
) -> None:
    logits = make_logits(6, 3)
    healthy, _ = sampler.sample(logits, [row(i, params) for i in range(3)])
    if fault == -math.inf:
        logits[1] = fault
    else:
        logits[1, 17] = fault
    sampled, failed = sampler.sample(logits, [row(i, params) for i in range(3)])
    assert [token.token_id for token in sampled] == [healthy[0].token_id, healthy[2].token_id]
    assert [sequence_id for sequence_id, _ in failed] == [101]
    assert why in failed[0][1]


def test_a_row_that_allows_no_token_fails_alone(sampler: Sampler) -> None:
    logits = make_logits(7, 2)
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    sampled, failed = sampler.sample(logits, [row(0, params), row(1, SamplingParams())])
    assert [token.sequence_id for token in sampled] == [101]
    assert failed[0][0] == 100
    assert "min_tokens" in failed[0][1]


def test_logits_that_nobody_reads_again_give_the_same_tokens(sampler: Sampler) -> None:
    """Written to in place, but for rows that ask for log probabilities, or share their logits."""
    penalised = SamplingParams(presence_penalty=1.5, repetition_penalty=1.3, logit_bias={7: 4.0})
    early = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=list(range(VOCAB)))
    held = SamplingParams(temperature=0.7, top_p=0.9)
    bits = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    bits[0, 1] = 0b1011
    masks = Masks({102: 0}, bits, [])
    several = [row(0, penalised, output_token_ids=[4, 4]), row(1, early), row(2, held)]
    for rows in (
        several,
        [*several, row(3, SamplingParams(logprobs=1))],
        [*several, row(2, penalised, sequence_id=104)],
    ):
        logits = make_logits(9, max(each.row for each in rows) + 1)
        expected, failed = sampler.sample(logits.clone(), rows, masks)
        assert [sequence_id for sequence_id, _ in failed] == [101]
        assert expected[1].token_id in (32, 33, 35)
        overwritten = sampler.sample(logits, rows, masks, may_overwrite=True)
        assert [t.token_id for t in overwritten[0]] == [t.token_id for t in expected]
        assert [t.logprobs for t in overwritten[0]] == [t.logprobs for t in expected]
        assert overwritten[1] == failed


def test_single_removed_tokens_are_never_chosen(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [3, 9]] = 0.0
    rows = [row(0, SamplingParams(), seed=seed, sequence_id=seed) for seed in range(50)]
    sampled, failed = sampler.sample(logits, rows)
    assert not failed
    assert {token.token_id for token in sampled} == {3, 9}


def test_no_rows_give_no_tokens(sampler: Sampler) -> None:
    assert sampler.sample(torch.empty(0, VOCAB), []) == ([], [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_narrower_dtype_are_widened_first(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = make_logits(10, 3).to(dtype)
    params = SamplingParams(temperature=0.7, top_p=0.9, logprobs=4, repetition_penalty=1.3)
    rows = [row(index, params) for index in range(3)]
    assert sampler.sample(logits, rows) == sampler.sample(logits.float(), rows)
    assert prompt_logprobs(logits, [3, 4, 5], 2) == prompt_logprobs(logits.float(), [3, 4, 5], 2)


def test_prompt_logprobs_describe_each_next_token() -> None:
    logits = make_logits(8, 70)
    next_ids = [(7 * i) % VOCAB for i in range(70)]
    described = prompt_logprobs(logits, next_ids, 2)
    raw = logits.double().log_softmax(-1)
    assert [position.token.token_id for position in described] == next_ids
    for i, position in enumerate(described):
        assert position.token.logprob == pytest.approx(raw[i, next_ids[i]].item(), abs=1e-5)
        assert position.top[0].token_id == int(logits[i].argmax())
        assert len(position.top) == 2
    assert prompt_logprobs(logits[3:4], next_ids[3:4], 2) == described[3:4]
    assert prompt_logprobs(logits[:0], [], 2) == []


@pytest.mark.parametrize("vocab_size", [331, 49_152, 50_257])
def test_logprobs_are_the_same_bits_alone_and_in_a_batch(vocab_size: int) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(9)) * 4
    ids = list(range(9))
    together = prompt_logprobs(logits, ids, 5)
    for i in range(9):
        assert prompt_logprobs(logits[i : i + 1].clone(), ids[i : i + 1], 5) == [together[i]]
