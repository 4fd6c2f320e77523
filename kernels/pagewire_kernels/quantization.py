"""Weight-only int8: symmetric, one scale for each output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGEST = 127
# Rounding makes fp32 copies: so many elements at a time stay in cache and bound their memory.
_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Int8Weight:
    """A linear's weight W of about `scales[:, None] * values`.

    Attributes:
        values: int8 [outputs, depth], from -127 to 127.
        scales: fp32 [outputs].
        dtype: what the weight was before.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of W: int64 [N] to [N, depth]."""
        return (self.values[rows] * self.scales[rows, None]).to(self.dtype)

    def dequantized(self) -> torch.Tensor:
        """W: [outputs, depth]."""
        return (self.values * self.scales[:, None]).to(self.dtype)


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Rounds each row of a weight [outputs, depth] to multiples of its largest magnitude / 127.

    The error of an element is at most half its row's scale. A row that holds NaN or infinity has a
    scale that is not finite, so that what it computes is not finite either.
    """
    outputs, depth = weight.shape
    values = torch.empty((outputs, depth), dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, depth))
    for start in range(0, outputs, step):
        rows = weight[start : start + step].float()
        largest = rows.abs().amax(dim=1) if depth else rows.new_zeros(len(rows))
        scale = largest / _LARGEST
        multiples = (rows / torch.where(scale == 0, 1.0, scale)[:, None]).round_()
        values[start : start + step] = multiples.nan_to_num_(0.0)
        scales[start : start + step] = scale
    return Int8Weight(values, scales, weight.dtype)
