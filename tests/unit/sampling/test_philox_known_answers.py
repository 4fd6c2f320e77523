"""Philox4x32-10 against the vectors of its authors' library, Random123 (kat_vectors)."""

from __future__ import annotations

import pytest
import torch

from pagewire_kernels.philox import gumbel_noise, philox4x32, token_words
from tests.unit.sampling import naive

_ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_ONES,) * 4, (_ONES, _ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _tensors(values: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_equals_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = _tensors(counter)
    k0, k1 = _tensors(key)
    words = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert tuple(word.item() for word in words) == expected
    assert naive.philox_words(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_token_word_is_the_lane_of_its_group_of_four(seed: int) -> None:
    token_ids = torch.tensor([0, 1, 2, 3, 4, 49151, 128255])
    position, index = torch.tensor(7), torch.tensor(3)
    words = token_words(torch.tensor(seed), index, position, token_ids).tolist()
    key = (seed & _ONES, (seed >> 32) & _ONES)
    assert words == [
        naive.philox_words((token_id >> 2, 7, 3, 0), key)[token_id & 3]
        for token_id in token_ids.tolist()
    ]


def test_noise_is_finite_at_both_ends_and_follows_the_gumbel_distribution() -> None:
    token_ids = torch.arange(200_000)
    zero = torch.tensor(0)
    noise = gumbel_noise(torch.tensor(42), zero, zero, token_ids)
    assert noise.dtype == torch.float64
    assert torch.isfinite(noise).all()
    # Mean is Euler's constant, variance pi^2 / 6; within four standard errors.
    assert abs(noise.mean().item() - 0.5772157) < 4 * (1.645 / 200_000) ** 0.5
    assert abs(noise.var().item() - 1.6449341) < 0.04
    below_zero = (noise < 0).double().mean().item()
    assert abs(below_zero - 0.3678794) < 4 * (0.2325 / 200_000) ** 0.5
