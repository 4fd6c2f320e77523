"""A few rows through a linear: weights stream through shared memory as a tensor core's left side.

A program computes BLOCK_N outputs of all rows (a tile of the next power of two, at least 8 or 16):
weights [BLOCK_N, BLOCK_K] times rows [BLOCK_K, tile], several stages of both in flight. Matrices of
few outputs make too few programs of 64 outputs to fill the device. They get programs of 16, whose
warps each take a slice of a block's depth (SLICES).

Floor: 2 * outputs * depth bytes at the memory's rate, as for one row; the rows come from the
second-level cache. The folder's README has what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire_kernels.gpu.launch import (
    gdc_launch_dependents,
    gdc_wait,
    has_dependent_launch,
    launch,
)

# Columns a tensor core's tile has at least: warps that share a tile want the wide instructions,
# which the compiler takes from 16 on.
_LEAST_TILE = 16
_LEAST_TILE_OF_SLICES = 8


@dataclass(frozen=True)
class SkinnyConfig:
    """How the product is cut.

    Attributes:
        outputs: rows of the weight a program computes; a power of two, at least 16.
        block: columns a warp's slice reads at a time; a power of two.
        warps: warps of a program.
        stages: blocks in flight.
        slices: a program's warps share out the depth in so many slices; 1, or as many as warps.
    """

    outputs: int
    block: int
    warps: int
    stages: int
    slices: int = 1


def skinny(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    config: SkinnyConfig,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear of a few rows, with what comes after.

    Args:
        hidden: [T, depth], rows may be strided.
        weight: [outputs, depth], contiguous; gated: [2 * size, depth], gates first.
        config: how it is cut.
        bias: as many as the weight has rows.
        gated: silu of the gates times the rest comes after.
        residual: [T, outputs], rows may be strided; is overwritten by its sum with the product.

    Returns:
        [T, outputs], gated: [T, size], of the rows' dtype; the residual where there is one.
    """
    tokens, depth = hidden.shape
    rows = weight.shape[0]
    output = residual
    if output is None:
        output = hidden.new_empty(tokens, rows // 2 if gated else rows)
    least_tile = _LEAST_TILE if config.slices == 1 else _LEAST_TILE_OF_SLICES
    dependent = has_dependent_launch(hidden.device)
    launch(
        dense_skinny,
        (-(-rows // config.outputs),),
        hidden,
        weight,
        hidden if bias is None else bias,
        output,
        tokens,
        hidden.stride(0),
        output.stride(0),
        ROWS=rows,
        DEPTH=depth,
        TILE=max(least_tile, 1 << (tokens - 1).bit_length()),
        BLOCK_N=config.outputs,
        BLOCK_K=config.block,
        SLICES=config.slices,
        STAGES=config.stages,
        HAS_BIAS=bias is not None,
        GATED=gated,
        ADDS=residual is not None,
        DEPENDENT=dependent,
        num_warps=config.warps,
        num_stages=config.stages,
        dependent=dependent,
    )
    return output


@triton.jit(do_not_specialize=["tokens"])
def dense_skinny(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    tokens: tl.tensor,
    hidden_stride: tl.tensor,
    output_stride: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """output[m, n] = sum over k of hidden[m, k] * weight[n, k], and what comes after.

    Everything between is transposed, [n, m], since a tensor core's tile has at least 16 rows, of
    which the weights fill every one. A gated program's rows are gate and up in turn.
    """
    STEP: tl.constexpr = SLICES * BLOCK_K
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the last row of the weight the last one serves: no load needs a mask for that.
    row = tl.minimum(own, ROWS - 1)
    if GATED:
        row = row // 2 + (row % 2) * (ROWS // 2)
    token = tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_K)
    if SLICES == 1:
        weight_columns = column[None, :]
        hidden_columns = column[:, None]
        weights = weight + row[:, None].to(tl.int64) * DEPTH + weight_columns
        inputs = hidden + token[None, :] * hidden_stride + hidden_columns
        present = token[None, :] < tokens
        sums = tl.zeros([BLOCK_N, TILE], tl.float32)
    else:
        slice_start = tl.arange(0, SLICES)[:, None, None] * BLOCK_K
        weight_columns = slice_start + column[None, None, :]
        hidden_columns = slice_start + column[None, :, None]
        weights = weight + row[None, :, None].to(tl.int64) * DEPTH + weight_columns
        inputs = hidden + token[None, None, :] * hidden_stride + hidden_columns
        present = token[None, None, :] < tokens
        sums = tl.zeros([SLICES, BLOCK_N, TILE], tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        if DEPTH % STEP == 0:
            values = tl.load(weights + start)
            rows = tl.load(inputs + start, mask=present, other=0.0)
        else:
            values = tl.load(weights + start, mask=start + weight_columns < DEPTH, other=0.0)
            mask = present & (start + hidden_columns < DEPTH)
            rows = tl.load(inputs + start, mask=mask, other=0.0)
        sums = tl.dot(values, rows, sums, input_precision="ieee")
    if SLICES > 1:
        sums = tl.sum(sums, 0)
    if HAS_BIAS:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(sums, [BLOCK_N // 2, 2, TILE]), [0, 2, 1])
        gate, up = tl.split(pairs)
        sums = gate / (1.0 + tl.exp(-gate)) * up
        place = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = (token[None, :] < tokens) & (place[:, None] < ROWS // 2)
    else:
        place = own
        inside = (token[None, :] < tokens) & (own[:, None] < ROWS)
    outputs = output + token[None, :] * output_stride + place[:, None]
    if ADDS:
        sums += tl.load(outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs, sums.to(output.dtype.element_ty), mask=inside)
