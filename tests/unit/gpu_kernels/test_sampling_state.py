"""Penalties on the device's own counts, and log probabilities, as the reference has them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pagewire.sampling_params import SamplingParams
from pagewire_engine.worker.sampler import Sampler, SamplingRow
from pagewire_kernels.gpu.sampling import (
    Epilogue,
    SamplingColumns,
    SamplingConfig,
    SamplingWorkspace,
    sample,
)
from pagewire_kernels.gpu.sampling_logprobs import raw_logprobs, top_tokens
from pagewire_kernels.gpu.sampling_penalties import Penalties, PenaltyState
from pagewire_kernels.logprobs import raw_logprobs as reference_logprobs
from pagewire_kernels.sampling import NOTHING_ALLOWED
from pagewire_kernels.token_order import largest

VOCAB_SIZE = 301
EOS = 2
SMALL = SamplingConfig(chunk=256, chunk_warps=1, tile=128, tile_warps=1)


@dataclass
class Sequence:
    """A sequence of the reference's: what it is sampled by, and its tokens."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def penalties(self) -> Penalties:
        stops = set(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            stops.add(EOS)
        return Penalties(
            prompt_token_ids=self.prompt,
            output_token_ids=self.output,
            repetition=self.params.repetition_penalty,
            frequency=self.params.frequency_penalty,
            presence=self.params.presence_penalty,
            min_tokens=self.params.min_tokens,
            suspended_token_ids=stops,
            bias=self.params.logit_bias,
        )


def make_sequences() -> list[Sequence]:
    """Every kind of adjustment, one without, and one that comes with a past."""
    kinds = [
        SamplingParams(temperature=0.0, repetition_penalty=1.7),
        SamplingParams(temperature=0.5, repetition_penalty=0.6, top_k=20),
        SamplingParams(temperature=0.0, frequency_penalty=1.5),
        SamplingParams(temperature=1.0, presence_penalty=1.9, top_p=0.8),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0, logit_bias={7: 30.0, 8: 28.0, 9: -40.0}),
        SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(5, 6)),
        SamplingParams(temperature=1.0, min_tokens=3, ignore_eos=True, stop_token_ids=(5,)),
        SamplingParams(
            temperature=1.0, repetition_penalty=1.2, frequency_penalty=-0.4, presence_penalty=0.3,
            min_tokens=6, logit_bias={11: 5.0, 2: 9.0}, min_p=0.02,
        ),
    ]  # fmt: skip
    sequences = [Sequence(params, [1, 5, 5, 9, EOS]) for params in kinds]
    sequences[3].output += [4, 4, 250]
    return sequences


def make_columns(sequences: list[Sequence]) -> SamplingColumns:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    params = [sequence.params for sequence in sequences]
    return SamplingColumns(
        temperature=column([p.temperature for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        top_k=column([p.top_k if p.top_k > 0 else VOCAB_SIZE for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        seed=column(list(range(len(params))), torch.int64),
        sequence_index=column([0] * len(params), torch.int32),
        position=column([len(s.output) for s in sequences], torch.int32),
    )


def make_state(num_slots: int, **limits: int) -> PenaltyState:
    sizes = {"num_histories": num_slots, "num_biases": num_slots, **limits}
    return PenaltyState(VOCAB_SIZE, num_slots, "cpu", **sizes)


def logits_that_repeat(step: int, rows: int) -> Tensor:
    """Nearly the same at each step, so that penalties decide; stops are likely."""
    logits = torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2
    logits[:, [EOS, 5, 6]] += 9.0
    logits[:, 100:110] += 3.5
    return logits + torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 0.1


def test_steps_on_device_counts_give_the_tokens_of_the_reference() -> None:
    sequences = make_sequences()
    rows = len(sequences)
    columns, state = make_columns(sequences), make_state(rows)
    for slot, sequence in enumerate(sequences):
        assert state.acquire(slot, sequence.penalties())
    sampler = Sampler(VOCAB_SIZE, [EOS], "cpu")
    workspace = SamplingWorkspace(rows, VOCAB_SIZE, "cpu")
    slots, out = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    last = [torch.zeros(rows, dtype=torch.int32) for _ in range(2)]
    for step in range(6):
        logits = logits_that_repeat(step, rows)
        sample(
            logits, slots, columns, out, workspace,
            adjustments=state.adjustments, epilogue=Epilogue(*last),
        )  # fmt: skip
        expected, failed = sampler.sample(
            logits,
            [
                SamplingRow(i, i, 0, i, sequence.params, sequence.prompt, list(sequence.output))
                for i, sequence in enumerate(sequences)
            ],
        )
        assert not failed
        assert out.tolist() == [token.token_id for token in expected], f"step {step}"
        for sequence, token in zip(sequences, expected, strict=True):
            sequence.output.append(token.token_id)
    stopped = [token_id in (EOS, 5, 6) for token_id in sequences[6].output]
    assert stopped == [False] * 4 + [True] * 2


def test_a_sequence_loaded_with_its_past_goes_on_as_if_it_had_never_left() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.8, min_tokens=9
    )
    sequence = Sequence(params, [1, 2, 3], [100, 100, 101])
    grown, loaded = make_state(1), make_state(1)
    grown.acquire(0, Sequence(params, [1, 2, 3]).penalties())
    columns = make_columns([Sequence(params, [1, 2, 3])])
    workspace = SamplingWorkspace(1, VOCAB_SIZE, "cpu", SMALL)
    slot, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for token_id in sequence.output:
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, token_id] = 50.0
        epilogue = Epilogue(torch.zeros_like(slot), torch.zeros_like(slot))
        sample(
            logits, slot, columns, out, workspace, adjustments=grown.adjustments, epilogue=epilogue
        )
        assert out.item() == token_id
    loaded.acquire(0, sequence.penalties())
    assert torch.equal(grown.adjustments.histories, loaded.adjustments.histories)


def test_a_row_with_every_token_suspended_has_none() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=tuple(range(16)))
    state = PenaltyState(16, 1, "cpu", num_histories=1, num_biases=0)
    state.acquire(0, Sequence(params, [1]).penalties())
    out = torch.zeros(1, dtype=torch.int32)
    sample(
        torch.zeros(1, 16),
        torch.zeros(1, dtype=torch.int32),
        make_columns([Sequence(params, [1])]),
        out,
        SamplingWorkspace(1, 16, "cpu", SMALL),
        adjustments=state.adjustments,
    )
    assert out.item() == NOTHING_ALLOWED


def in_use(state: PenaltyState) -> bool:
    """Whether any slot has a history or a bias."""
    return bool((state.adjustments.history >= 0).any() or (state.adjustments.bias >= 0).any())


def test_histories_are_bounded_and_come_back_clean() -> None:
    state = make_state(3, num_histories=1, num_biases=1)
    repeats = Penalties([1, 2], [3, 3], repetition=1.5)
    biased = Penalties(bias={4: 1.0})
    assert not in_use(state)
    assert state.acquire(0, Penalties(output_token_ids=[1], min_tokens=3)), "nothing to suspend"
    assert not in_use(state)
    assert state.acquire(0, repeats)
    assert state.acquire(1, biased)
    assert not state.acquire(2, repeats)
    assert not state.acquire(2, biased)
    assert state.adjustments.history.tolist() == [0, -1, -1]
    assert state.acquire(0, Penalties([7], [8], presence=0.1)), "its own is free again"
    assert state.adjustments.histories[0].nonzero().flatten().tolist() == [8]
    state.release(0)
    state.release(1)
    assert not in_use(state)
    assert state.adjustments.history.tolist() == state.adjustments.bias.tolist() == [-1, -1, -1]
    assert state.acquire(2, repeats)


@pytest.mark.parametrize(
    "penalties",
    [
        Penalties([VOCAB_SIZE], repetition=1.1),
        Penalties([], [-1], presence=0.1),
        Penalties(min_tokens=1, suspended_token_ids=[VOCAB_SIZE]),
        Penalties(bias={VOCAB_SIZE: 1.0}),
    ],
)
def test_token_ids_that_would_end_the_process_are_refused(penalties: Penalties) -> None:
    state = make_state(1)
    with pytest.raises(ValueError, match="must lie between 0 and 300"):
        state.acquire(0, penalties)
    assert not in_use(state)


@pytest.mark.parametrize("vocab_size", [1, 50, 64, 4096, 4100, 9000])
def test_logprobs_equal_those_of_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(3, vocab_size, generator=generator) * 3).round(decimals=1)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    logits[:, vocab_size // 2] = 0.5
    rows = torch.tensor([2, 0, 2, 1, 1])
    ids = torch.tensor([0, vocab_size // 2, vocab_size - 1, vocab_size // 3, vocab_size // 2])
    num_top = min(20, vocab_size)
    expected = reference_logprobs(logits[rows], ids, num_top)
    found = raw_logprobs(logits, ids, num_top, rows)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    assert found[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-5)
    assert found[3].tolist() == expected[3].tolist()


def test_logprobs_are_the_same_bits_alone_and_without_alternatives() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).half()
    ids = torch.tensor([1, 2, -1, 4], dtype=torch.int32)
    together = raw_logprobs(logits, ids, 5)
    for row in range(4):
        alone = raw_logprobs(logits[row : row + 1], ids[row : row + 1], 5)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[row])
    logprobs, ranks, top, top_ids = raw_logprobs(logits, ids, 0)
    assert torch.equal(logprobs, together[0])
    assert torch.equal(ranks, together[1])
    assert top.shape == top_ids.shape == (4, 0)


@pytest.mark.parametrize("count", [1, 20, 64, 330, 331, 500])
def test_top_tokens_are_ordered_by_value_then_id(count: int) -> None:
    logits = (torch.randn(4, 331, generator=torch.Generator().manual_seed(2)) * 2).round()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    values, ids = top_tokens(logits, count)
    expected_values, expected_ids = largest(logits, count)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected_values)
