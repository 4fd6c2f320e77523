"""A few rows through a linear: weights stream through shared memory as a tensor core's left side.

A program computes BLOCK_N outputs of all rows (a tile of 16, or the next power of two):
weights [BLOCK_N, BLOCK_K] times rows [BLOCK_K, tile], several stages of both in flight. Matrices
of few outputs make too few programs of 64 outputs to fill the device. They get smaller ones whose
warps each take a slice of a block's depth (SLICES), or several programs for the same outputs
(SPLITS), the last of which adds the parts up.

Floor: 2 * outputs * depth bytes at 2.98 TB/s, as for one row; the rows come from the second-level
cache. Measured on an H100 at 8 rows, 64 x 128, 7 stages, as a chain of all linears of a step:
1.00 ms of a floor of 0.83 (1B), 5.25 of 5.03 (8B); cuBLAS 1.10 and 5.68.
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

# Programs a launch must have to fill an H100's 132 multiprocessors about twice.
_ENOUGH_PROGRAMS = 256


@dataclass(frozen=True)
class SkinnyConfig:
    """How the product is cut.

    Attributes:
        outputs: rows of the weight a program computes; a power of two, at least 16.
        block: columns a warp's slice reads at a time; a power of two.
        warps: warps of a program.
        stages: blocks in flight.
        slices: a program's warps share out the depth in so many slices; 1, or as many as warps.
        splits: programs that share out the depth of the same outputs; not with a norm or gate.
        prefetch: lines of 128 bytes of each row of the weight that are sent for before the wait;
            a power of two, or 0.
        tile: rows of hidden states a program is made for at least: 8 or 16.
    """

    outputs: int
    block: int
    warps: int
    stages: int
    slices: int = 1
    splits: int = 1
    prefetch: int = 0
    tile: int = 16


def skinny_config(rows: int) -> SkinnyConfig:
    """By the weight's rows: wide programs if they are enough, else sliced ones.

    Args:
        rows: of the weight.
    """
    if rows >= 64 * _ENOUGH_PROGRAMS:
        return SkinnyConfig(64, 128, 4, 7)
    if rows >= 32 * _ENOUGH_PROGRAMS:
        return SkinnyConfig(32, 128, 4, 7)
    return SkinnyConfig(16, 128, 4, 4, slices=4)


def num_programs(rows: int, config: SkinnyConfig) -> int:
    """Programs for different outputs: what `arrivals` must have room for if the depth is split."""
    return -(-rows // config.outputs)


def skinny(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """A linear of a few rows, with what surrounds it.

    Args:
        hidden: [T, depth], rows may be strided.
        weight: [outputs, depth], contiguous; gated: [2 * size, depth], gates first.
        bias: as many as the weight has rows.
        norm_weight: [depth]; the rows' RMS norm comes before. Rows times it are rounded to their
            dtype: not for float16, whose range an unnormed row may leave.
        eps: the norm's.
        gated: silu of the gates times the rest comes after.
        residual: [T, outputs], rows may be strided; is overwritten by its sum with the product.
        arrivals: int32 zeros [num_programs(outputs, config)] for a config with splits; they are
            zeros again afterwards. Launches that share them must be of one stream.
        config: default: by the weight's rows.

    Returns:
        [T, outputs], gated: [T, size], of the rows' dtype; the residual where there is one.

    Raises:
        ValueError: a config with splits, and a norm, a gate or too few arrivals.
    """
    tokens, depth = hidden.shape
    rows = len(weight)
    config = config or skinny_config(rows)
    if config.splits > 1:
        if gated or norm_weight is not None:
            raise ValueError("neither norm nor gate can be folded into a product of split depth")
        if arrivals is None or len(arrivals) < num_programs(rows, config):
            raise ValueError(
                f"a product of split depth needs {num_programs(rows, config)} arrivals"
            )
    tile = max(config.tile, triton.next_power_of_2(tokens))
    output = residual
    if output is None:
        output = hidden.new_empty(tokens, rows // 2 if gated else rows)
    parts = output
    if config.splits > 1:
        parts = hidden.new_empty((config.splits, tokens, rows), dtype=torch.float32)
    dependent = has_dependent_launch(hidden.device)
    launch(
        dense_skinny,
        (num_programs(rows, config), config.splits),
        hidden,
        weight,
        hidden if bias is None else bias,
        hidden if norm_weight is None else norm_weight,
        output,
        parts,
        parts if arrivals is None else arrivals,
        tokens,
        hidden.stride(0),
        output.stride(0),
        eps,
        ROWS=rows,
        DEPTH=depth,
        TILE=tile,
        BLOCK_N=config.outputs,
        BLOCK_K=config.block,
        SLICES=config.slices,
        SPLITS=config.splits,
        STAGES=config.stages,
        PREFETCH=config.prefetch,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
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
    norm_weight: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    tokens: tl.tensor,
    hidden_stride: tl.tensor,
    output_stride: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """output[m, n] = sum over k of hidden[m, k] * weight[n, k], and what is folded in.

    Everything between is transposed, [n, m], since a tensor core's tile has at least 16 rows, of
    which the weights fill every one. A gated program's rows are gate and up in turn.
    """
    STEP: tl.constexpr = SLICES * BLOCK_K
    SHARE: tl.constexpr = (DEPTH + SPLITS * STEP - 1) // (SPLITS * STEP) * STEP
    EVEN: tl.constexpr = DEPTH % (SPLITS * STEP) == 0
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the last row of the weight the last one serves: no load needs a mask for that.
    row = tl.minimum(own, ROWS - 1)
    if GATED:
        row = row // 2 + (row % 2) * (ROWS // 2)
    token = tl.arange(0, TILE)
    if SLICES == 1:
        column = tl.arange(0, BLOCK_K)
        weight_columns = column[None, :]
        hidden_columns = column[:, None]
        weights = weight + row[:, None].to(tl.int64) * DEPTH + weight_columns
        inputs = hidden + token[None, :] * hidden_stride + hidden_columns
        present = token[None, :] < tokens
        sums = tl.zeros([BLOCK_N, TILE], tl.float32)
        squares = tl.zeros([BLOCK_K, TILE], tl.float32)
    else:
        slice_start = tl.arange(0, SLICES)[:, None, None] * BLOCK_K
        column = tl.arange(0, BLOCK_K)
        weight_columns = slice_start + column[None, None, :]
        hidden_columns = slice_start + column[None, :, None]
        weights = weight + row[None, :, None].to(tl.int64) * DEPTH + weight_columns
        inputs = hidden + token[None, None, :] * hidden_stride + hidden_columns
        present = token[None, None, :] < tokens
        sums = tl.zeros([SLICES, BLOCK_N, TILE], tl.float32)
        squares = tl.zeros([SLICES, BLOCK_K, TILE], tl.float32)
    if SPLITS == 1:
        first = 0
        last = DEPTH
    else:
        first = tl.program_id(1) * SHARE
        last = tl.minimum(first + SHARE, DEPTH)
    if HAS_NORM:
        # A block ahead of its use, in registers: too narrow for a copy to shared memory.
        scales = norm_weight + hidden_columns
        scale = tl.load(scales, mask=hidden_columns < DEPTH, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH > 0:
            line = tl.minimum(first + tl.arange(0, PREFETCH) * 64, DEPTH - 1)
            _prefetch(weight + row[:, None].to(tl.int64) * DEPTH + line[None, :])
        gdc_wait()
    for start in tl.range(first, last, STEP, num_stages=STAGES):
        if EVEN:
            values = tl.load(weights + start)
            rows = tl.load(inputs + start, mask=present, other=0.0)
        else:
            values = tl.load(weights + start, mask=start + weight_columns < DEPTH, other=0.0)
            mask = present & (start + hidden_columns < DEPTH)
            rows = tl.load(inputs + start, mask=mask, other=0.0)
        if HAS_NORM:
            wide = rows.to(tl.float32)
            squares += wide * wide
            rows = (wide * scale.to(tl.float32)).to(values.dtype)
            ahead = start + STEP + hidden_columns
            scale = tl.load(scales + (start + STEP), mask=ahead < DEPTH, other=0.0)
        sums = tl.dot(values, rows, sums, input_precision="ieee")
    if SLICES > 1:
        sums = tl.sum(sums, 0)
        squares = tl.sum(squares, 0)
    if HAS_NORM:
        norm = tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)
        sums *= norm[None, :]
    if SPLITS == 1:
        _finish(sums, row, own, token, bias, output, tokens, output_stride,
                ROWS, BLOCK_N, TILE, HAS_BIAS, GATED, ADDS)  # fmt: skip
    else:
        place = token[None, :] * ROWS + row[:, None]
        inside = (token[None, :] < tokens) & (own[:, None] < ROWS)
        tl.store(parts + tl.program_id(1) * tokens * ROWS + place, sums, mask=inside)
        # All threads' parts are written before the arrival is counted, and counted before the
        # last program, whichever it is, reads them past its own first-level cache.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            total = tl.zeros([BLOCK_N, TILE], tl.float32)
            for split in tl.static_range(SPLITS):
                part = parts + split * tokens * ROWS + place
                total += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(total, row, own, token, bias, output, tokens, output_stride,
                    ROWS, BLOCK_N, TILE, HAS_BIAS, GATED, ADDS)  # fmt: skip
            tl.store(arrivals + tl.program_id(0), 0)


@triton.jit
def _finish(
    sums: tl.tensor,
    row: tl.tensor,
    own: tl.tensor,
    token: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    tokens: tl.tensor,
    output_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Bias, activation and residual of sums [BLOCK_N, TILE], and their way out."""
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


@triton.jit
def _prefetch(
    pointers: tl.tensor,
) -> None:
    """Sends for the lines of these addresses into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
