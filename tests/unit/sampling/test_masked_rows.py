"""Logits less what masks forbid: both backends take what the bits say, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagewire_kernels import build, cpu
from pagewire_kernels.token_masks import MaskedRows, TorchMaskedRows, forbidden


@pytest.fixture(scope="module", params=["torch", "cpu"])
def masked_rows(request: pytest.FixtureRequest) -> MaskedRows:
    if request.param == "torch":
        return TorchMaskedRows()
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()
    return cpu.load_masked_rows()


def _bits(generator: np.random.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    words = generator.integers(0, 2**32, (rows, -(-vocab_size // 32)), dtype=np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _allows(bits: torch.Tensor, mask: int, token_id: int) -> bool:
    return bool(int(bits[mask, token_id // 32]) >> token_id % 32 & 1)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 288, 5000])
def test_each_row_keeps_what_its_mask_allows(masked_rows: MaskedRows, vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.normal(size=(5, vocab_size)).astype(np.float32))
    before, bits = logits.clone(), _bits(generator, 3, vocab_size)
    rows, masks = [4, 0, 0, 2], [2, -1, 0, 1]
    taken, left = masked_rows.take(logits, rows, masks, bits)
    expected = [
        [
            float(logits[row, token]) if mask < 0 or _allows(bits, mask, token) else -math.inf
            for token in range(vocab_size)
        ]
        for row, mask in zip(rows, masks, strict=True)
    ]
    assert taken.tolist() == expected
    assert left == [max(row) > -math.inf for row in expected]
    taken.zero_()
    assert torch.equal(logits, before), "the logits are as they were"


def test_a_row_of_which_nothing_is_left_is_told_apart(masked_rows: MaskedRows) -> None:
    logits = torch.zeros(3, 64)
    logits[1, 5] = -math.inf
    bits = torch.tensor([[0, 0], [1 << 5, 0]], dtype=torch.int32)
    taken, left = masked_rows.take(logits, [0, 1, 2], [0, 1, 1], bits)
    assert left == [False, False, True]
    assert taken[2].tolist() == [0.0 if token == 5 else -math.inf for token in range(64)]


def test_in_place_the_logits_are_what_is_taken(masked_rows: MaskedRows) -> None:
    generator = np.random.default_rng(4)
    logits = torch.from_numpy(generator.normal(size=(30, 6000)).astype(np.float32))[:, :5003]
    before, bits = logits.clone(), _bits(generator, 30, 5003)
    rows, masks = list(range(30)), [-1 if row % 5 == 0 else 29 - row for row in range(30)]
    expected, _ = masked_rows.take(before, rows, masks, bits)
    taken, left = masked_rows.take(logits, rows, masks, bits, in_place=True)
    assert taken.data_ptr() == logits.data_ptr()
    assert torch.equal(logits, expected)
    assert all(left)


def test_many_rows_of_a_strided_batch(masked_rows: MaskedRows) -> None:
    """Enough for several threads, and fewer the next time."""
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(size=(40, 9000)).astype(np.float32))[:, :8190]
    bits = _bits(generator, 40, 8190)
    for count in (40, 3):
        rows = list(range(count))
        taken, left = masked_rows.take(logits, rows, rows[::-1], bits)
        away = forbidden(bits[:count].flip(0), 8190)
        assert torch.equal(taken, logits[:count].masked_fill(away, -math.inf))
        assert all(left)


def test_bits_of_another_size_are_refused() -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()
    with pytest.raises(ValueError, match="a bit for each token"):
        cpu.load_masked_rows().take(
            torch.zeros(1, 65), [0], [0], torch.zeros(1, 2, dtype=torch.int32)
        )
