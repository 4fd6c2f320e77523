"""The reference backend against attention written out, on batches that mix all there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagewire_kernels import ops
from pagewire_kernels.attention import AttentionMetadata, load_attention_backend
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.torch_attention import TorchAttention

HEAD_DIM = 16


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Row by row: query [Tq, H, D] are the last of key's and value's [L, KV, D]."""
    group = query.shape[1] // key.shape[1]
    output = torch.zeros(query.shape)
    for row in range(len(query)):
        position = len(key) - len(query) + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            keys = key[first : position + 1, head // group].float()
            scores = keys @ query[row, head].float() * scale
            values = value[first : position + 1, head // group].float()
            output[row, head] = scores.softmax(0) @ values
    return output


def _batch(
    chunks: list[tuple[int, int]], num_kv_heads: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Caches and metadata for (context length, query length) of each sequence.

    All slots that no context covers hold NaN, block 0 (the padding of tables) wholly.
    """
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-context // block_size) for context, _ in chunks]
    num_blocks = 1 + sum(blocks_of)
    order = 1 + torch.randperm(num_blocks - 1, generator=generator).numpy()
    tables = np.zeros((len(chunks), max(blocks_of)), np.int32)
    shape = (num_blocks, block_size, num_kv_heads, HEAD_DIM)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    used = 0
    slots = []
    for row, (context, length) in enumerate(chunks):
        tables[row, : blocks_of[row]] = order[used : used + blocks_of[row]]
        used += blocks_of[row]
        positions = np.arange(context - length, context)
        slots.append(tables[row, positions // block_size] * block_size + positions % block_size)
        last = int(tables[row, blocks_of[row] - 1])
        for cache in caches:
            cache[last, context - (blocks_of[row] - 1) * block_size :] = math.nan
    for cache in caches:
        cache[0] = math.nan
    lengths = [length for _, length in chunks]
    metadata = AttentionMetadata.from_host(
        query_start_locations=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_lengths=np.array([context for context, _ in chunks], np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots).astype(np.int64),
        num_decodes=sum(length == 1 for length in lengths),
    )
    return caches[0], caches[1], metadata


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_batch_equals_attention_written_out(
    window: int | None, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    # Decodes of very different lengths (several gathers), a whole prompt, chunks behind others.
    chunks = [(1, 1), (33, 1), (700, 1), (47, 1), (9, 9), (40, 13), (2, 2)]
    key_cache, value_cache, metadata = _batch(chunks, num_kv_heads, block_size, torch.float32)
    query = torch.randn(metadata.slot_mapping.shape[0], num_heads, HEAD_DIM)
    backend = load_attention_backend("torch", "cpu", HEAD_DIM)
    ours = backend.paged_attention(query, key_cache, value_cache, metadata, 0.3, window)
    starts = metadata.host_query_start_locations
    for row, (context, _) in enumerate(chunks):
        table = metadata.block_tables[row, : -(-context // block_size)].long()
        key, value = (cache[table].flatten(0, 1)[:context] for cache in (key_cache, value_cache))
        rows = slice(starts[row], starts[row + 1])
        expected = _written_out(query[rows], key, value, 0.3, window)
        torch.testing.assert_close(ours[rows], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_low_precision_keeps_fp32_sums(dtype: torch.dtype, atol: float) -> None:
    chunks = [(130, 1), (60, 20)]
    key_cache, value_cache, metadata = _batch(chunks, 2, 16, dtype)
    query = torch.randn(21, 4, HEAD_DIM).to(dtype)
    ours = TorchAttention().paged_attention(query, key_cache, value_cache, metadata, 0.25)
    assert ours.dtype is dtype
    starts = metadata.host_query_start_locations
    for row, (context, _) in enumerate(chunks):
        table = metadata.block_tables[row, : -(-context // 16)].long()
        key, value = (cache[table].flatten(0, 1)[:context] for cache in (key_cache, value_cache))
        rows = slice(starts[row], starts[row + 1])
        expected = _written_out(query[rows], key, value, 0.25, None)
        torch.testing.assert_close(ours[rows].float(), expected, atol=atol, rtol=0)


def test_a_chunk_longer_than_one_mask_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [(90, 70), (64, 64)]
    key_cache, value_cache, metadata = _batch(chunks, 1, 8, torch.float32)
    query = torch.randn(134, 2, HEAD_DIM)
    whole = TorchAttention().paged_attention(query, key_cache, value_cache, metadata, 0.2, 50)
    monkeypatch.setattr("pagewire_kernels.torch_attention._MAX_MASK_ROWS", 16)
    pieces = TorchAttention().paged_attention(query, key_cache, value_cache, metadata, 0.2, 50)
    torch.testing.assert_close(pieces, whole)


def test_keys_and_values_are_written_to_their_slots_only() -> None:
    key_cache, value_cache, metadata = _batch([(7, 3), (5, 5)], 2, 4, torch.float32)
    before = key_cache.clone(), value_cache.clone()
    packed = torch.randn(8, 4, HEAD_DIM)  # as a view of a packed projection is: strided rows
    key, value = packed[:, :2], packed[:, 2:]
    TorchAttention().write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
    for cache, old, new in zip((key_cache, value_cache), before, (key, value), strict=True):
        old.flatten(0, 1)[metadata.slot_mapping] = new
        torch.testing.assert_close(cache, old, equal_nan=True, atol=0, rtol=0)


def test_rotation_with_the_write_is_one_after_the_other() -> None:
    key_cache, value_cache, metadata = _batch([(7, 3), (5, 5)], 2, 4, torch.float32)
    packed = torch.randn(8, 8, HEAD_DIM)
    query, key, value = packed.split((4, 2, 2), dim=1)
    angles = torch.rand(9, HEAD_DIM // 2)
    positions = torch.tensor([4, 5, 6, 0, 1, 2, 3, 4])
    caches = key_cache.clone(), value_cache.clone()
    rotation = ops.gather_rotation(angles.cos(), angles.sin(), positions, torch.float32)
    backend = TorchAttention()
    backend.write_kv(ops.rotate(key, *rotation), value, *caches, metadata.slot_mapping)
    expected = ops.rotate(query, *rotation)
    rotated = backend.rotate_and_write(
        query, key, value, positions, angles.cos(), angles.sin(),
        key_cache, value_cache, metadata.slot_mapping,
    )  # fmt: skip
    assert torch.equal(rotated, expected)
    for ours, theirs in zip((key_cache, value_cache), caches, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, atol=0, rtol=0)


def test_fp8_keys_and_values_are_rounded_and_read() -> None:
    key_cache, value_cache, metadata = _batch([(30, 1), (25, 20)], 2, 4, torch.float8_e4m3fn)
    query = torch.randn(21, 4, HEAD_DIM)
    key, value = torch.randn(2, 21, 2, HEAD_DIM)
    key[3, 0, 5] = 1e4
    backend = TorchAttention()
    backend.write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
    stored = key_cache.float().flatten(0, 1)[metadata.slot_mapping]
    torch.testing.assert_close(stored, key.clamp(max=448.0), atol=1e-3, rtol=2.0**-4)
    ours = backend.paged_attention(query, key_cache, value_cache, metadata, 0.2)
    wide = backend.paged_attention(query, key_cache.float(), value_cache.float(), metadata, 0.2)
    assert torch.equal(ours, wide)


def test_what_is_dispatched_can_be_told() -> None:
    key_cache, value_cache, metadata = _batch([(7, 3)], 2, 4, torch.float32)
    query = torch.randn(3, 4, HEAD_DIM)
    with recorded() as launches, recorded() as inner:
        TorchAttention().paged_attention(query, key_cache, value_cache, metadata, 0.2)
    TorchAttention().paged_attention(query, key_cache, value_cache, metadata, 0.2)
    assert launches == inner == {"torch.scaled_dot_product_attention": 1}
