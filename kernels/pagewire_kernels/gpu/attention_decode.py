"""Decode attention in Triton: one query token a sequence, its keys split over several programs.

Flash decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html): each program attends to a
stretch of a sequence's keys for the query heads that share a kv head, and a second kernel weighs
the parts. How long the stretches are is computed here, of the length the device knows, so that a
CUDA graph captured once serves every length.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def load_rows(
    pointers: tl.tensor,
    valid: tl.tensor,
    dims: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> Any:
    """[rows, PADDED_DIM], 0 in rows that are not valid and beyond HEAD_DIM."""
    mask = valid[:, None]
    if PADDED_DIM != HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def decode_split(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lengths: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    part_weights: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: (kv head x tile of ROWS of its GROUP query heads, split, sequence).

    Args:
        query: [B, NUM_KV_HEADS * GROUP, HEAD_DIM], rows query_stride apart.
        key_cache: [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]; also value_cache.
        block_tables: int32, rows table_stride apart.
        context_lengths: int32 [B]; where it is 0 the result is 0.
        output: as the query, contiguous; written where WHOLE, and there is one split.
        parts: fp32 [B, heads, num_splits, HEAD_DIM], else: each split's result, unwritten where it
            has no keys.
        part_weights: fp32 [B, heads, num_splits]: log2 of each split's sum of weights.
        scale: factor on query-key products, times log2(e).
        WINDOW: keys that are visible, 0 for all.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // TILES
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    context = tl.load(context_lengths + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    begin = first // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(context - begin, num_splits), BLOCK_N) * BLOCK_N
    start = begin + split * length
    end = tl.minimum(start + length, context)

    dims = tl.arange(0, PADDED_DIM)
    group_heads = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    is_head = group_heads < GROUP
    heads = kv_head * GROUP + group_heads
    query_rows = query + sequence.to(tl.int64) * query_stride + heads * HEAD_DIM
    q = load_rows(query_rows[:, None] + dims[None, :], is_head, dims, HEAD_DIM, PADDED_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for position in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        keys = position + tl.arange(0, BLOCK_N)
        valid = keys < end
        block = tl.load(table + keys // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slots = block * BLOCK_SIZE + keys % BLOCK_SIZE
        offsets = (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        k = load_rows(key_cache + offsets, valid, dims, HEAD_DIM, PADDED_DIM).to(q.dtype)
        v = load_rows(value_cache + offsets, valid, dims, HEAD_DIM, PADDED_DIM).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if WINDOW > 0:
            valid = valid & (keys >= first)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        # Each tile has a visible key: the maximum is finite.
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        result = result * rescale[:, None] + weighted
        maximum = new_maximum

    result = result / tl.where(total == 0, 1.0, total)[:, None]
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    rows = sequence.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    if WHOLE:
        pointers = output + rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, result.to(output.dtype.element_ty), mask=mask)
    else:
        places = rows * num_splits + split
        has_keys = start < end
        pointers = parts + places[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, result, mask=mask & has_keys)
        weight = maximum + tl.log2(tl.where(total == 0, 1.0, total))
        tl.store(part_weights + places, weight, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def decode_reduce(
    parts: tl.tensor,
    part_weights: tl.tensor,
    output: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Weighs the splits of one head of one sequence a program, SPLITS at a time.

    Args:
        parts: fp32 [programs, num_splits, HEAD_DIM]; not read where the weight is 0.
        part_weights: fp32 [programs, num_splits], log2.
        output: [programs, HEAD_DIM].
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([PADDED_DIM], tl.float32)
    for first in tl.range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        places = row * num_splits + splits
        logs = tl.load(part_weights + places, mask=splits < num_splits, other=float("-inf"))
        pointers = parts + places[:, None] * HEAD_DIM + dims[None, :]
        part = load_rows(pointers, logs != float("-inf"), dims, HEAD_DIM, PADDED_DIM)
        new_maximum = tl.maximum(maximum, tl.max(logs, 0))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(logs - finite)
        rescale = tl.exp2(maximum - finite)
        total = total * rescale + tl.sum(weights, 0)
        result = result * rescale + tl.sum(part * weights[:, None], 0)
        maximum = new_maximum
    result = result / tl.where(total == 0, 1.0, total)
    pointers = output + row * HEAD_DIM + dims
    tl.store(pointers, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
