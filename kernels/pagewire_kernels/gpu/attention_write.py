"""Cache writes in Triton, with the rotation of query and key in the same launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The largest number of float8_e4m3fn: what is beyond it is rounded to it.
_LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def _to_cache(numbers: tl.tensor, pointers: tl.tensor, mask: tl.tensor) -> None:
    if pointers.dtype.element_ty == tl.float8e4nv:
        numbers = tl.clamp(numbers.to(tl.float32), -_LARGEST_FP8, _LARGEST_FP8)
    tl.store(pointers, numbers.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _angles(
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    token: tl.tensor,
    dims: tl.tensor,
    HALF: tl.constexpr,
) -> Any:
    """Cosines and sines [1, PADDED_HALF] of a token's position."""
    places = tl.load(positions + token) * HALF + dims
    cosines = tl.load(cos + places, mask=dims < HALF, other=0.0)
    sines = tl.load(sin + places, mask=dims < HALF, other=0.0)
    return cosines[None, :], sines[None, :]


@triton.jit
def _rotated(low: tl.tensor, high: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> Any:
    """Both halves of a head after rotation, in fp32."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def write_rows(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: (token, HEADS of its query, key or value heads).

    Without ROTATE there are none for the query, and query, positions, cos and sin are not read.

    Args:
        query: [T, NUM_HEADS, HEAD_DIM], rows query_stride apart; rotated in place.
        key: [T, NUM_KV_HEADS, HEAD_DIM], rows key_stride apart; also value.
        positions: int64 [T].
        cos: fp32 [max_positions, HEAD_DIM // 2]; also sin.
        key_cache: [slots, NUM_KV_HEADS, HEAD_DIM]; also value_cache.
        slot_mapping: int64 [T]; nothing is done for a token whose slot is negative.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = (HEAD_DIM + 1) // 2
    KV_PROGRAMS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    QUERY_PROGRAMS: tl.constexpr = ROTATE * ((NUM_HEADS + HEADS - 1) // HEADS)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) - QUERY_PROGRAMS
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        dims = tl.arange(0, PADDED_HALF)
        if part < 0:
            if ROTATE:
                heads = (part + QUERY_PROGRAMS) * HEADS + tl.arange(0, HEADS)
                mask = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
                lows = query + token * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
                cosines, sines = _angles(cos, sin, positions, token, dims, HALF)
                low, high = _rotated(
                    tl.load(lows, mask=mask), tl.load(lows + HALF, mask=mask), cosines, sines
                )
                low = low.to(query.dtype.element_ty)
                high = high.to(query.dtype.element_ty)
                tl.store(lows, low, mask=mask)
                tl.store(lows + HALF, high, mask=mask)
        else:
            heads = part % KV_PROGRAMS * HEADS + tl.arange(0, HEADS)
            is_head = (heads < NUM_KV_HEADS)[:, None]
            mask = is_head & (dims < HALF)[None, :]
            # The second half of an odd head is one shorter.
            high_mask = is_head & (dims < HEAD_DIM - HALF)[None, :]
            inside = heads[:, None] * HEAD_DIM + dims[None, :]
            places = slot * (NUM_KV_HEADS * HEAD_DIM) + inside
            if part < KV_PROGRAMS:
                lows = key + token * key_stride + inside
                low = tl.load(lows, mask=mask)
                high = tl.load(lows + HALF, mask=high_mask)
                if ROTATE:
                    cosines, sines = _angles(cos, sin, positions, token, dims, HALF)
                    low, high = _rotated(low, high, cosines, sines)
                    # As if the rotated key had been stored on its way.
                    low = low.to(key.dtype.element_ty)
                    high = high.to(key.dtype.element_ty)
                _to_cache(low, key_cache + places, mask)
                _to_cache(high, key_cache + places + HALF, high_mask)
            else:
                lows = value + token * value_stride + inside
                _to_cache(tl.load(lows, mask=mask), value_cache + places, mask)
                high = tl.load(lows + HALF, mask=high_mask)
                _to_cache(high, value_cache + places + HALF, high_mask)
