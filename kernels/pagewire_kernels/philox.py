"""Philox4x32-10, the counter-based generator behind all sampling noise.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It is
integer arithmetic only, so torch, C++ and Triton give the same bits on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Runs the ten rounds on each counter.

    Args:
        counter: four int64 tensors of 32-bit words in [0, 2^32), shapes that broadcast together.
        key: two int64 tensors of 32-bit words that broadcast with the counter.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps into int64's sign bit at most: masking after the
        # arithmetic shift leaves the exact high word.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK32) ^ c1 ^ k0,
            product_1 & _MASK32,
            ((product_0 >> 32) & _MASK32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0 = (k0 + _WEYL_0) & _MASK32
        k1 = (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def token_words(
    seeds: Tensor, sequence_indexes: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    """The random word of each candidate token.

    Counter (token_id >> 2, output position, sequence index, 0), key the seed's two halves, output
    word token_id & 3: four neighbouring tokens share one evaluation where a kernel wants that.

    Args:
        seeds: int64, any value.
        sequence_indexes: int64, the sequence's index within its request.
        positions: int64, tokens the sequence has produced before this one.
        token_ids: int64. All four broadcast together.

    Returns:
        int64 words in [0, 2^32), of the broadcast shape.
    """
    words = philox4x32(
        (token_ids >> 2, positions & _MASK32, sequence_indexes, torch.zeros_like(token_ids)),
        (seeds & _MASK32, (seeds >> 32) & _MASK32),
    )
    lane = token_ids & 3
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return torch.where(lane < 2, low, high)


def gumbel_noise(
    seeds: Tensor, sequence_indexes: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    """Standard Gumbel noise of each candidate token, float64, between about -2.85 and 17.33.

    u = ((word >> 8) + 0.5) * 2^-24 is never 0 or 1. It has 25 significant bits, hence float64:
    float32 would round the largest to 1 and the noise to infinity.

    Args and shape: as for `token_words`.
    """
    words = token_words(seeds, sequence_indexes, positions, token_ids)
    uniform = ((words >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))
