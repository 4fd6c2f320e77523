"""Attention of prompts and their chunks in Triton, over paged blocks.

Flash attention (arXiv:2307.08691) with the query heads that share a kv head packed into one tile:
its rows are tokens x heads, so that keys are read once for all of them and a tile's causal edge is
short.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pagewire_kernels.gpu.attention_decode import load_rows


@triton.jit
def counted_tile(
    query_start_locations: tl.tensor,
    num_decodes: tl.tensor,
    tile: tl.tensor,
    TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
) -> Any:
    """Which tile of which sequence the tile of that number is, counting those of all chunks.

    Returns:
        The sequence, and the tile's first token in it; past the last tile, one that none has.
    """
    each = tl.arange(0, PADDED_SEQUENCES)
    is_chunk = (each >= tl.load(num_decodes)) & (each < SEQUENCES)
    starts = tl.load(query_start_locations + each, mask=is_chunk, other=0)
    ends = tl.load(query_start_locations + each + 1, mask=is_chunk, other=0)
    ends_of_tiles = tl.cumsum((ends - starts + TOKENS - 1) // TOKENS, 0)
    is_before = ends_of_tiles <= tile
    sequence = tl.minimum(tl.sum(is_before.to(tl.int32), 0), SEQUENCES - 1)
    first_tile = tl.max(tl.where(is_before, ends_of_tiles, 0), 0)
    is_tile = tile < tl.max(ends_of_tiles, 0)
    return sequence, tl.where(is_tile, (tile - first_tile) * TOKENS, 1 << 30)


@triton.jit(do_not_specialize=["table_stride", "first_sequence"])
def chunk_attention(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start_locations: tl.tensor,
    context_lengths: tl.tensor,
    output: tl.tensor,
    num_decodes: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    first_sequence: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
) -> None:
    """Programs: (tile of ROWS // PACKED_HEADS tokens, kv head x part of its heads, sequence), or
    with SEQUENCES: (tile of any sequence, the same, 1).

    Args:
        query: [T, NUM_KV_HEADS * GROUP, HEAD_DIM], rows query_stride apart.
        key_cache: [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]; also value_cache.
        block_tables: int32, rows table_stride apart.
        query_start_locations: int32; a sequence may have no rows.
        context_lengths: int32.
        output: as the query, contiguous.
        scale: factor (> 0) on query-key products, times log2(e).
        num_decodes: int32 [1], with SEQUENCES: so many sequences are not computed.
        first_sequence: sequences before it are not computed, without.
        WINDOW: keys that are visible, 0 for all.
        PACKED_HEADS: heads of a tile, the GROUP or a part of it.
        SEQUENCES: 0, or most sequences there are, where the device alone knows how many.
        PADDED_SEQUENCES: the next power of two.
    """
    TOKENS: tl.constexpr = ROWS // PACKED_HEADS
    PARTS: tl.constexpr = (GROUP + PACKED_HEADS - 1) // PACKED_HEADS
    # The last tiles, which have most to do, start first.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    kv_head = tl.program_id(1) // PARTS
    sequence = first_sequence + tl.program_id(2)
    if SEQUENCES > 0:
        sequence, first_token = counted_tile(
            query_start_locations,
            num_decodes,
            tl.num_programs(0) - 1 - tl.program_id(0),
            TOKENS,
            SEQUENCES,
            PADDED_SEQUENCES,
        )
    start = tl.load(query_start_locations + sequence)
    num_tokens = tl.load(query_start_locations + sequence + 1) - start
    if first_token < num_tokens:
        context = tl.load(context_lengths + sequence)
        rows = tl.arange(0, ROWS)
        tokens = first_token + rows // PACKED_HEADS
        group_heads = tl.program_id(1) % PARTS * PACKED_HEADS + rows % PACKED_HEADS
        is_row = (rows < TOKENS * PACKED_HEADS) & (tokens < num_tokens) & (group_heads < GROUP)
        heads = kv_head * GROUP + group_heads
        dims = tl.arange(0, PADDED_DIM)
        table = block_tables + sequence.to(tl.int64) * table_stride
        query_rows = query + (start + tokens).to(tl.int64) * query_stride + heads * HEAD_DIM
        q = load_rows(query_rows[:, None] + dims[None, :], is_row, dims, HEAD_DIM, PADDED_DIM)

        # Keys [begin, end) are some row's, [all_begin, all_end) every row's.
        first_position = context - num_tokens + first_token
        positions = context - num_tokens + tokens
        end = tl.minimum(first_position + TOKENS, context)
        all_end = first_position + 1
        begin = 0
        all_begin = 0
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            all_begin = first_position + TOKENS - WINDOW

        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        # One loop, so that loads run ahead to the end: a second one for the tile at the causal edge
        # would start with nothing loaded.
        for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            keys = first_key + tl.arange(0, BLOCK_N)
            in_context = keys < end
            block = tl.load(table + keys // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
            slots = block * BLOCK_SIZE + keys % BLOCK_SIZE
            offsets = (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
            k = load_rows(key_cache + offsets, in_context, dims, HEAD_DIM, PADDED_DIM)
            v = load_rows(value_cache + offsets, in_context, dims, HEAD_DIM, PADDED_DIM)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            if (first_key + BLOCK_N > all_end) | (first_key < all_begin):
                visible = keys[None, :] <= positions[:, None]
                if WINDOW > 0:
                    visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
            # A row that has seen no key yet: its weights are 0, not NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores * scale - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            total = total * rescale + tl.sum(weights, 1)
            result = result * rescale[:, None]
            result = tl.dot(weights.to(q.dtype), v.to(q.dtype), result, input_precision="ieee")
            maximum = new_maximum

        result = result / tl.where(total == 0, 1.0, total)[:, None]
        output_rows = (start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        pointers = output + output_rows[:, None] * HEAD_DIM + dims[None, :]
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(pointers, result.to(output.dtype.element_ty), mask=mask)
