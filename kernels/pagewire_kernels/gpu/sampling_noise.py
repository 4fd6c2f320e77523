"""The noise of sampling on the device: bits as pagewire_kernels/philox.py, and the race they run.

Gumbel-max takes the token with the largest score - log(-log(u)). That is the one with the smallest
-log(u) * exp(-score): each token runs for an exponential time at a rate of its probability, and the
first to arrive is chosen. This form needs one logarithm instead of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)
# The bits of sqrt(1/2) as a float.
_ROOT_HALF = tl.constexpr(0x3F3504F3)


@triton.jit
def exponential(word: tl.tensor) -> Any:
    """-log(u) for u = ((word >> 8) + 0.5) / 2^24, to 3e-7 of its value.

    u itself is no float32 where it is near 1, but 1 - u is, and only that is used there.

    Args:
        word: uint32, any shape.

    Returns:
        float32, between 2.9e-8 and 17.4.
    """
    step = (word >> 8).to(tl.int32).to(tl.float32)
    u = (step + 0.5) * 5.9604644775390625e-8
    rest = ((16777215.0 - step) + 0.5) * 5.9604644775390625e-8
    # u = mantissa * 2^exponent, the mantissa between sqrt(1/2) and sqrt(2).
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    past_one = tl.where(exponent == 0, -rest, mantissa - 1.0)
    # log(1 + x) = 2 atanh(x / (2 + x)), the series up to where float32 ends.
    ratio = past_one / (past_one + 2.0)
    square = ratio * ratio
    series = 1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9)))
    log_mantissa = 2.0 * ratio + 2.0 * ratio * square * series
    return -(exponent.to(tl.float32) * _LN2 + log_mantissa)


@triton.jit
def words_of_quads(
    quads: tl.tensor,
    seed: tl.tensor,
    sequence_index: tl.tensor,
    position: tl.tensor,
    COUNT: tl.constexpr,
) -> Any:
    """The random words of four neighbouring tokens each.

    Args:
        quads: int32 [COUNT], token ids divided by 4.
        seed: int64 scalar; sequence_index and position: int32 scalars.

    Returns:
        uint32 [COUNT, 4].
    """
    first, second, third, fourth = tl.philox(seed, quads, position, sequence_index, 0)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(words, (COUNT, 4))


@triton.jit
def words_of_tokens(
    token_ids: tl.tensor, seed: tl.tensor, sequence_index: tl.tensor, position: tl.tensor
) -> Any:
    """The random word of each token by itself: uint32, of the shape of token_ids, int32."""
    first, second, third, fourth = tl.philox(seed, token_ids >> 2, position, sequence_index, 0)
    lane = token_ids & 3
    low = tl.where(lane == 0, first, second)
    high = tl.where(lane == 2, third, fourth)
    return tl.where(lane < 2, low, high)
