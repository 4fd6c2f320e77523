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


@triton.jit
def used_splits(
    context: tl.tensor,
    num_splits: tl.tensor,
    wanted_splits: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONGEST: tl.constexpr,
) -> Any:
    """How a sequence's keys are spread: the wanted splits have keys alone, until they would be
    longer than LONGEST, and then as many of all as it takes.

    Returns:
        The first key, keys of a split (a multiple of BLOCK_N), and splits that have any.
    """
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    num_keys = context - begin
    length = tl.cdiv(num_keys, wanted_splits)
    length = tl.minimum(length, tl.maximum(LONGEST, tl.cdiv(num_keys, num_splits)))
    length = tl.maximum(tl.cdiv(length, BLOCK_N), 1) * BLOCK_N
    return begin, length, tl.cdiv(num_keys, length)


@triton.jit
def counted_splits(num_decodes: tl.tensor, num_places: tl.tensor, MOST: tl.constexpr) -> Any:
    """How a launch of num_places programs is shared out where the device alone knows how many
    decodes there are.

    Returns:
        The decodes, and over how many programs each is split.
    """
    count = tl.load(num_decodes)
    return count, tl.minimum(num_places // tl.maximum(count, 1), MOST)


@triton.jit(do_not_specialize=["table_stride", "num_splits", "wanted_splits"])
def decode_split(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lengths: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    part_weights: tl.tensor,
    num_decodes: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    wanted_splits: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LONGEST: tl.constexpr,
    WHOLE: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: (kv head x tile of ROWS of its GROUP query heads, split, sequence), or with MOST:
    (the same, places, 1), where places are shared out among the decodes there are.

    Args:
        query: [B, NUM_KV_HEADS * GROUP, HEAD_DIM], rows query_stride apart.
        key_cache: [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]; also value_cache.
        block_tables: int32, rows table_stride apart.
        context_lengths: int32 [B]; where it is 0 the result is 0.
        output: as the query, contiguous; written where no more than one split has keys.
        parts: fp32 [B, heads, num_splits, HEAD_DIM], else: the result of each split with keys.
        part_weights: fp32 [B, heads, num_splits]: log2 of each such split's sum of weights.
        num_decodes: int32 [1], with MOST: how many sequences there are.
        scale: factor on query-key products, times log2(e).
        num_splits: of the launch; with MOST: its places.
        wanted_splits: how many of them are enough for short contexts.
        WINDOW: keys that are visible, 0 for all.
        LONGEST: keys of a split, where there are splits enough.
        WHOLE: there is but one split, and no parts.
        MOST: 0, or most splits of a sequence.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // TILES
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    if MOST > 0:
        count, num_splits = counted_splits(num_decodes, num_splits, MOST)
        wanted_splits = num_splits
        sequence = tl.program_id(1) // num_splits
        split = tl.program_id(1) % num_splits
        if sequence >= count:
            return
    context = tl.load(context_lengths + sequence)
    begin, length, used = used_splits(context, num_splits, wanted_splits, WINDOW, BLOCK_N, LONGEST)
    if (split >= used) & (split > 0):
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
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
    is_whole = used <= 1
    pointers = output + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=mask & is_whole)
    if not WHOLE:
        places = rows * num_splits + split
        pointers = parts + places[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, result, mask=mask & (used > 1))
        weight = maximum + tl.log2(tl.where(total == 0, 1.0, total))
        tl.store(part_weights + places, weight, mask=is_head & (used > 1))


@triton.jit(do_not_specialize=["num_splits", "wanted_splits"])
def decode_reduce(
    parts: tl.tensor,
    part_weights: tl.tensor,
    context_lengths: tl.tensor,
    output: tl.tensor,
    num_decodes: tl.tensor,
    num_splits: tl.tensor,
    wanted_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONGEST: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Weighs the splits of one head of one sequence a program, SPLITS at a time. See decode_split.

    Args:
        parts: fp32 [programs, num_splits, HEAD_DIM], as `decode_split` leaves them.
        part_weights: fp32 [programs, num_splits], log2.
        context_lengths: int32 [sequences]; they tell which splits have keys.
        output: [programs, HEAD_DIM]; written already where no more than one has.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if MOST > 0:
        count, num_splits = counted_splits(num_decodes, num_splits, MOST)
        wanted_splits = num_splits
        if row >= count * NUM_HEADS:
            return
    context = tl.load(context_lengths + row // NUM_HEADS)
    _, _, used = used_splits(context, num_splits, wanted_splits, WINDOW, BLOCK_N, LONGEST)
    if used <= 1:
        return
    dims = tl.arange(0, PADDED_DIM)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([PADDED_DIM], tl.float32)
    for first in tl.range(0, used, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        places = row * num_splits + splits
        has_keys = splits < used
        logs = tl.load(part_weights + places, mask=has_keys, other=float("-inf"))
        pointers = parts + places[:, None] * HEAD_DIM + dims[None, :]
        part = load_rows(pointers, has_keys, dims, HEAD_DIM, PADDED_DIM)
        # Each split in use has a visible key: the maximum is finite.
        new_maximum = tl.maximum(maximum, tl.max(logs, 0))
        weights = tl.exp2(logs - new_maximum)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 0)
        result = result * rescale + tl.sum(part * weights[:, None], 0)
        maximum = new_maximum
    pointers = output + row * HEAD_DIM + dims
    tl.store(pointers, (result / total).to(output.dtype.element_ty), mask=dims < HEAD_DIM)
