"""Choices under masks: both backends choose as if all that is forbidden were -inf."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagewire_kernels import build, cpu
from pagewire_kernels.sampling import NOT_A_NUMBER, NOTHING_ALLOWED, RowParameters, TokenChooser
from pagewire_kernels.token_masks import TokenMasks, masked_logits
from tests.unit.sampling import naive

WAYS = [
    (0.0, 0.0, 0, 1.0),
    (0.9, 0.0, 0, 1.0),
    (1.5, 0.02, 0, 1.0),
    (0.8, 0.0, 0, 0.9),
    (0.7, 0.0, 12, 1.0),
    (1.2, 0.0, 40, 0.8),
]


def _parameters(num_rows: int, vocab_size: int) -> RowParameters:
    ways = [WAYS[row % len(WAYS)] for row in range(num_rows)]
    return RowParameters(
        temperatures=[way[0] for way in ways],
        min_ps=[way[1] for way in ways],
        top_ks=[way[2] or vocab_size for way in ways],
        top_ps=[way[3] for way in ways],
        seeds=[31 * row - 5 for row in range(num_rows)],
        sequence_indexes=[0] * num_rows,
        positions=list(range(num_rows)),
    )


def _bits(generator: np.random.Generator, masks: int, vocab_size: int) -> torch.Tensor:
    """Every third allows about half, every third some, every third whole words or none."""
    shape = (masks, -(-vocab_size // 32))
    words = generator.integers(0, 2**32, shape, dtype=np.uint32)
    for _ in range(3):
        words[1::3] &= generator.integers(0, 2**32, words[1::3].shape, dtype=np.uint32)
    words[2::3] = np.where(generator.random(words[2::3].shape) < 0.8, 0, 2**32 - 1)
    words[:, 0] |= 1
    return torch.from_numpy(words.view(np.int32))


def _allows(bits: torch.Tensor, mask: int, token_id: int) -> bool:
    return bool(int(bits[mask, token_id // 32]) >> token_id % 32 & 1)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 288, 5003])
def test_what_is_forbidden_is_never_chosen(chooser: TokenChooser, vocab_size: int) -> None:
    num_rows = 36
    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.normal(size=(num_rows, vocab_size)).astype(np.float32)) * 4
    before, bits = logits.clone(), _bits(generator, 7, vocab_size)
    masks = [-1 if row % 5 == 0 else row % 7 for row in range(num_rows)]
    removed = logits.clone()
    for row, mask in enumerate(masks):
        for token in range(vocab_size):
            if mask >= 0 and not _allows(bits, mask, token):
                removed[row, token] = -math.inf
    parameters = _parameters(num_rows, vocab_size)
    chosen = chooser.choose(logits, parameters, TokenMasks(masks, bits))
    assert torch.equal(logits, before), "the logits are as they were"
    assert torch.equal(masked_logits(logits, TokenMasks(masks, bits)), removed)
    assert chosen.tolist() == chooser.choose(removed, parameters).tolist()


def test_rows_of_a_strided_batch(chooser: TokenChooser) -> None:
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(size=(40, 9000)).astype(np.float32))[:, :8190]
    masks = TokenMasks(list(range(40))[::-1], _bits(generator, 40, 8190))
    parameters = _parameters(40, 8190)
    chosen = chooser.choose(logits, parameters, masks)
    assert chosen.tolist() == chooser.choose(masked_logits(logits, masks), parameters).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_is_told_apart(chooser: TokenChooser, temperature: float) -> None:
    logits = torch.zeros(6, 70)
    logits[1, 5] = -math.inf
    logits[2] = -math.inf
    logits[3, 69] = math.nan
    logits[4, 6] = math.inf
    bits = torch.tensor([[0, 0, 0], [1 << 5, 0, 0]], dtype=torch.int32)
    parameters = _parameters(6, 70)
    parameters = RowParameters(**{**vars(parameters), "temperatures": [temperature] * 6})
    chosen = chooser.choose(logits, parameters, TokenMasks([0, 1, -1, 1, 1, 1], bits))
    # What is forbidden is no number either: the row was computed wrong.
    assert chosen.tolist() == [
        *(NOTHING_ALLOWED, NOTHING_ALLOWED, NOTHING_ALLOWED),
        *(NOT_A_NUMBER, NOT_A_NUMBER, 5),
    ]


@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0, 40.0])
def test_filters_find_their_candidates_however_far_down_they_are(
    chooser: TokenChooser, scale: float
) -> None:
    """Flat rows have thousands of candidates, steep ones a few: cuts are found in both."""
    vocab_size, num_rows = 20_000, 12
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    top_ks = [vocab_size, 700, 19_000] * 4
    parameters = RowParameters(
        **{
            **vars(_parameters(num_rows, vocab_size)),
            "temperatures": [1.0] * num_rows,
            "min_ps": [0.0] * num_rows,
            "top_ks": top_ks,
            "top_ps": [0.999, 1.0, 0.97, 0.5] * 3,
        }
    )
    chosen = chooser.choose(logits, parameters).tolist()
    for row in range(num_rows):
        assert chosen[row] == naive.choose(
            logits[row].tolist(),
            *(getattr(parameters, name)[row] for name in RowParameters.__dataclass_fields__),
        )


def test_bits_of_another_size_are_refused() -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()
    masks = TokenMasks([0], torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="a bit for each token"):
        cpu.load_chooser().choose(torch.zeros(1, 65), _parameters(1, 65), masks)


def test_rows_without_a_mask_each_are_refused() -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()
    chooser, bits = cpu.load_chooser(), torch.zeros(1, 2, dtype=torch.int32)
    for rows in ([0], [0, 1]):
        with pytest.raises(ValueError, match="a mask each"):
            chooser.choose(torch.zeros(2, 64), _parameters(2, 64), TokenMasks(rows, bits))
    with pytest.raises(ValueError, match="of every parameter"):
        chooser.choose(torch.zeros(2, 64), _parameters(3, 64))
    with pytest.raises(ValueError, match="top_k"):
        chooser.choose(torch.zeros(1, 64), _parameters(1, 0))
