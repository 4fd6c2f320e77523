"""Norm and activation of many rows: one pass over memory, 16 bytes a load.

Floor: bytes read and written at 2.98 TB/s: rms_norm 4 * T * size (2-byte numbers), silu_and_mul
6 * T * size. Expected from 2.5 TB/s on once the rows outgrow the second-level cache; below some 64
rows a launch's 2 us are all there is.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from pagewire_kernels.gpu.launch import (
    gdc_launch_dependents,
    gdc_wait,
    has_dependent_launch,
    launch,
)

# Numbers a program of the norm has at least: short rows (a head's) share one.
_NORM_TILE = 1024
# Columns of a program of the activation: 2 loads of 16 bytes for each of 128 threads' two inputs.
_SILU_BLOCK = 2048


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ops.rms_norm, rounded once.

    Args:
        hidden: [T, size] or [T, heads, size]; the last dimension is contiguous.
        weight: [size].
        eps: added to the mean square.

    Returns:
        The same shape, contiguous.
    """
    shape = hidden.shape
    size, heads = shape[-1], shape[1] if len(shape) == 3 else 1
    rows = shape[0] * heads
    output = hidden.new_empty(shape)
    block, tile_rows, num_warps = _norm_tile(size)
    dependent = has_dependent_launch(hidden.device)
    launch(
        rms_norm_rows,
        (-(-rows // tile_rows),),
        hidden,
        weight,
        output,
        rows,
        hidden.stride(0),
        hidden.stride(1) if len(shape) == 3 else 0,
        eps,
        HEADS=heads,
        SIZE=size,
        ROWS=tile_rows,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=num_warps,
        dependent=dependent,
    )
    return output


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ops.silu_and_mul, rounded once: [T, 2 * size] (rows may be strided) to [T, size]."""
    tokens, width = gate_up.shape
    size = width // 2
    output = gate_up.new_empty((tokens, size))
    block = _silu_block(size)
    dependent = has_dependent_launch(gate_up.device)
    launch(
        silu_and_mul_rows,
        (tokens, -(-size // block)),
        gate_up,
        output,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        dependent=dependent,
    )
    return output


# Triton's own functions of numbers take 3 us each on the host.
@cache
def _norm_tile(size: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program that norms rows of so many numbers."""
    block = 1 << (size - 1).bit_length()
    return block, max(1, _NORM_TILE // block), min(16, max(4, block // 1024))


@cache
def _silu_block(size: int) -> int:
    return min(_SILU_BLOCK, 1 << (size - 1).bit_length())


@triton.jit(do_not_specialize=["rows"])
def rms_norm_rows(
    hidden: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A program norms ROWS rows of all tokens' heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < SIZE)
    scales = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    start = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
    values = tl.load(hidden + start[:, None] + column[None, :], mask=inside, other=0.0)
    values = values.to(tl.float32)
    norm = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    normed = values * norm[:, None] * scales[None, :]
    place = row[:, None].to(tl.int64) * SIZE + column[None, :]
    tl.store(output + place, normed.to(output.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul_rows(
    gate_up: tl.tensor,
    output: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A program computes a block of one row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    gates = gate_up + row * stride + column
    gate = tl.load(gates, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=column < SIZE, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * SIZE + column, product.to(output.dtype.element_ty), mask=column < SIZE)
