"""The likeliest tokens of a beam, and how many of them are told."""

from __future__ import annotations

import math

import pytest
import torch

from pagewire.beam_search_params import BeamSearchParams
from pagewire_engine.worker.beam_candidates import beam_candidates
from pagewire_engine.worker.sampler import SamplingRow

VOCAB_SIZE = 500


def row(
    sequence_id: int,
    index: int = 0,
    *,
    beam_width: int = 3,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> SamplingRow:
    params = BeamSearchParams(
        beam_width=beam_width, temperature=temperature, ignore_eos=ignore_eos, logprobs=logprobs
    )
    return SamplingRow(sequence_id, index, 0, 0, params.as_sampling_params(), [1], [2])


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 4


def test_they_are_the_likeliest_of_their_row_in_falling_order(logits: torch.Tensor) -> None:
    found, failed = beam_candidates(logits, [row(7, 2), row(8, 0)], 1)
    assert not failed
    assert [each.sequence_id for each in found] == [7, 8]
    for each, index in zip(found, (2, 0), strict=True):
        expected = torch.log_softmax(logits[index].double(), dim=-1).topk(6)
        assert each.token_ids == expected.indices.tolist()
        assert each.logprobs == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_logits_of_a_narrower_dtype_are_widened_first(logits: torch.Tensor) -> None:
    narrow, rows = logits.bfloat16(), [row(7, 2), row(8, 0, temperature=0.5)]
    assert beam_candidates(narrow, rows, 1) == beam_candidates(narrow.float(), rows, 1)


@pytest.mark.parametrize(
    ("beam", "num_eos", "count"),
    [
        (row(1), 0, 6),
        (row(1), 1, 6),
        (row(1), 4, 15),
        (row(1, ignore_eos=True), 4, 6),
        (row(1, logprobs=20), 1, 20),
        (row(1, beam_width=100), 9, VOCAB_SIZE),
    ],
)
def test_there_are_enough_of_them(
    logits: torch.Tensor, beam: SamplingRow, num_eos: int, count: int
) -> None:
    [found], _ = beam_candidates(logits, [beam], num_eos)
    assert len(found.token_ids) == len(found.logprobs) == count
    assert len(set(found.token_ids)) == count


def test_a_temperature_flattens_what_is_compared(logits: torch.Tensor) -> None:
    beams = [row(1), row(2, temperature=1.0), row(3, temperature=2.0)]
    (raw, one, two), _ = beam_candidates(logits, beams, 1)
    assert raw.logprobs == one.logprobs
    assert two.token_ids == raw.token_ids
    expected = torch.log_softmax(logits[0] / 2, dim=-1).topk(6).values
    assert two.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_rows_beside_a_beam_change_nothing(logits: torch.Tensor) -> None:
    together, _ = beam_candidates(logits, [row(i, i, beam_width=i + 1) for i in range(3)], 1)
    for i in range(3):
        [alone], _ = beam_candidates(logits[i : i + 1], [row(i, beam_width=i + 1)], 1)
        assert alone == together[i]


def test_the_lower_id_comes_first_among_equals() -> None:
    [found], _ = beam_candidates(torch.zeros(1, VOCAB_SIZE), [row(1)], 1)
    assert found.token_ids == [0, 1, 2, 3, 4, 5]
    assert found.logprobs == pytest.approx([-math.log(VOCAB_SIZE)] * 6)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_faulty_row_fails_alone(logits: torch.Tensor, fault: float) -> None:
    logits[1, 5] = fault
    found, failed = beam_candidates(logits, [row(i, i) for i in range(3)], 1)
    assert [each.sequence_id for each in found] == [0, 2]
    assert [sequence_id for sequence_id, _ in failed] == [1]
