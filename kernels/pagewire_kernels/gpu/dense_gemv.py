"""One row through a linear: memory alone sets the pace, so that every byte but the weights goes.

A program computes a few outputs; its threads lie side by side along the depth. The norm before, the
activation or the residual after are folded in, and a program's first weights are on their way
before the kernel ahead has ended (see the folder's README for what may be done before the wait).

Floor: 2 * outputs * depth bytes at 2.98 TB/s. Measured on an H100 as a chain of all linears of a
step, cut alike at all depths: 0.85 ms of a floor of 0.83 (1B), 4.81 of 5.03 (8B; reads alone go a
little faster than 2.98).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pagewire_kernels.gpu.launch import (
    gdc_launch_dependents,
    gdc_wait,
    has_dependent_launch,
    launch,
)


@dataclass(frozen=True)
class GemvConfig:
    """How a GEMV is cut.

    Attributes:
        outputs: outputs a program computes (of a gated one: pairs).
        block: columns read at a time; a power of two.
        warps: warps of a program; 16 columns a thread keep two 16-byte loads a row in flight.
    """

    outputs: int
    block: int
    warps: int


def gemv(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    config: GemvConfig,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear of one row, with what surrounds it.

    Args:
        hidden: [1, depth], contiguous.
        weight: [outputs, depth], contiguous; gated: [2 * size, depth], gates first.
        config: how it is cut.
        bias: as many as the weight has rows.
        norm_weight: [depth]; the row's RMS norm (arXiv:1910.07467) comes before.
        eps: the norm's.
        gated: silu of the gates times the rest comes after (SwiGLU, arXiv:2002.05202).
        residual: [1, outputs], contiguous; is overwritten by its sum with the product.

    Returns:
        [1, outputs], gated: [1, size], of the row's dtype; the residual where there is one. Sums
        are fp32 throughout and rounded once.
    """
    rows, depth = weight.shape
    outputs = rows // 2 if gated else rows
    output = hidden.new_empty(1, outputs) if residual is None else residual
    dependent = has_dependent_launch(hidden.device)
    launch(
        dense_gemv,
        (-(-outputs // config.outputs),),
        hidden,
        weight,
        hidden if bias is None else bias,
        hidden if norm_weight is None else norm_weight,
        output,
        eps,
        SIZE=outputs,
        DEPTH=depth,
        OUTPUTS=config.outputs,
        BLOCK=config.block,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
        GATED=gated,
        ADDS=residual is not None,
        DEPENDENT=dependent,
        num_warps=config.warps,
        dependent=dependent,
    )
    return output


@triton.jit
def dense_gemv(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    output: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """output[n] = sum over k of weight[n, k] * hidden[k] for n < SIZE, and what is folded in."""
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Past the last output the last one is computed again: no load needs a mask for that.
    row = tl.minimum(own, SIZE - 1)
    column = tl.arange(0, BLOCK)
    weights = weight + row[:, None].to(tl.int64) * DEPTH + column[None, :]
    up_weights = weights + SIZE * DEPTH
    products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    up_products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    values = _load(weights, column[None, :], DEPTH, BLOCK)
    if GATED:
        up_values = _load(up_weights, column[None, :], DEPTH, BLOCK)
    if HAS_NORM:
        scales = _load(norm_weight + column, column, DEPTH, BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.static_range(0, DEPTH, BLOCK):
        inputs = _load(hidden + start + column, start + column, DEPTH, BLOCK).to(tl.float32)
        if HAS_NORM:
            squares += inputs * inputs
            inputs *= scales.to(tl.float32)
        products += values.to(tl.float32) * inputs[None, :]
        if GATED:
            up_products += up_values.to(tl.float32) * inputs[None, :]
        if start + BLOCK < DEPTH:
            ahead = start + BLOCK + column
            values = _load(weights + (start + BLOCK), ahead[None, :], DEPTH, BLOCK)
            if GATED:
                up_values = _load(up_weights + (start + BLOCK), ahead[None, :], DEPTH, BLOCK)
            if HAS_NORM:
                scales = _load(norm_weight + ahead, ahead, DEPTH, BLOCK)
    total = tl.sum(products, 1)
    up_total = tl.sum(up_products, 1)
    if HAS_NORM:
        norm = tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)
        total *= norm
        up_total *= norm
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)
        if GATED:
            up_total += tl.load(bias + SIZE + row).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    if ADDS:
        total += tl.load(output + row).to(tl.float32)
    tl.store(output + own, total.to(output.dtype.element_ty), mask=own < SIZE)


@triton.jit
def _load(
    pointers: tl.tensor,
    column: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Masked where the last block goes past the depth, and only there."""
    if DEPTH % BLOCK == 0:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=column < DEPTH, other=0.0)
    return values
