"""The reference backend: plain torch, any device and dtype. The others must equal it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pagewire_kernels.attention import AttentionBackend, AttentionMetadata
from pagewire_kernels.dispatch_record import note

# Decodes are gathered into one padded batch as long as it stays this small (tokens of padded
# context). More decodes, or contexts more than twice as long as the shortest, make a new batch.
_MAX_GATHERED_TOKENS = 32768
# A chunk behind earlier ones needs a mask of its rows times the context: so many rows at a time.
_MAX_MASK_ROWS = 512

FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(FP8).max


@dataclass(frozen=True)
class _DecodeGroup:
    """Decodes gathered together, in a padded batch of B rows and L = width * block_size keys."""

    rows: torch.Tensor | None  # which of the decodes; None: all, in order
    blocks: torch.Tensor  # int64 [B * width]
    padding: torch.Tensor  # int64, flat positions of [B * L] beyond the contexts
    mask: torch.Tensor  # bool [B, 1, 1, L], True: visible
    size: int


class TorchAttention(AttentionBackend):
    """Gathers through the block tables, then scaled_dot_product_attention."""

    name = "torch"
    head_dim_multiple = 1

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        for cache, rows in ((key_cache, key), (value_cache, value)):
            if cache.dtype == FP8:
                # What is beyond the largest number is rounded to it, not to NaN.
                rows = rows.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(FP8)
            target, source = bits(cache.flatten(0, 1)), bits(rows.to(cache.dtype))
            target.index_copy_(0, slot_mapping, source)

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        note("torch.scaled_dot_product_attention")
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        block_size = key_cache.shape[1]
        if metadata.num_decodes:
            for group in _decode_groups(metadata, block_size, sliding_window):
                rows = slice(0, metadata.num_decodes) if group.rows is None else group.rows
                output[rows] = _decode(query[rows], key_cache, value_cache, group, scale)
        starts = metadata.host_query_start_locations
        for sequence in range(metadata.num_decodes, len(starts) - 1):
            rows = slice(starts[sequence], starts[sequence + 1])
            context_length = metadata.host_context_lengths[sequence]
            num_blocks = -(-context_length // block_size)
            blocks = metadata.block_tables[sequence, :num_blocks].long()
            key, value = (
                gather(cache, blocks).flatten(0, 1)[:context_length].to(query.dtype)
                for cache in (key_cache, value_cache)
            )
            _prefill(query[rows], key, value, scale, sliding_window, output[rows])
        return output


def load_backend(device: torch.device) -> TorchAttention:
    """The reference runs everywhere."""
    return TorchAttention()


def bits(cache: torch.Tensor) -> torch.Tensor:
    """The same memory, of a type that torch copies by index everywhere: fp8 as bytes."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def gather(cache: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """Rows of a cache of any dtype, by int64 [N]."""
    return bits(cache).index_select(0, indexes).view(cache.dtype)


def _decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    group: _DecodeGroup,
    scale: float,
) -> torch.Tensor:
    """One query token a sequence: [B, num_heads, head_dim]."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    gathered = []
    for cache in (key_cache, value_cache):
        tokens = gather(cache, group.blocks).flatten(0, 1).to(query.dtype)
        # Stale slots may hold NaN, which a mask alone lets through (0 * NaN).
        tokens.index_fill_(0, group.padding, 0.0)
        gathered.append(tokens.view(group.size, -1, num_kv_heads, head_dim).transpose(1, 2))
    # The heads that share a kv head become query positions of one head: nothing is repeated.
    grouped = query.reshape(group.size, num_kv_heads, -1, head_dim)
    attended = F.scaled_dot_product_attention(
        grouped, gathered[0], gathered[1], attn_mask=group.mask, scale=scale
    )
    return attended.reshape(group.size, -1, head_dim)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    output: torch.Tensor,
) -> None:
    """A chunk of one sequence: query [Tq, H, D] are the last Tq of key's and value's [L, KV, D]."""
    before = len(key) - len(query)
    for start in range(0, len(query), _MAX_MASK_ROWS):
        rows = slice(start, min(start + _MAX_MASK_ROWS, len(query)))
        seen = before + rows.stop
        output[rows] = _attend(query[rows], key[:seen], value[:seen], scale, sliding_window)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention; the last query stands at the last key."""
    num_tokens, num_heads, head_dim = query.shape
    context_length, num_kv_heads, _ = key.shape
    # kv heads become the batch, and sharing heads read them through a stride of 0.
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_tokens, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, group_size, context_length, head_dim)
    keys = key.transpose(0, 1).unsqueeze(1).expand(shape)
    values = value.transpose(0, 1).unsqueeze(1).expand(shape)
    windowed = sliding_window is not None and sliding_window < context_length
    mask = None
    if windowed or num_tokens < context_length:
        positions = torch.arange(context_length, device=query.device)
        distance = positions[context_length - num_tokens :, None] - positions[None, :]
        mask = distance >= 0
        if sliding_window is not None:
            mask &= distance < sliding_window
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _decode_groups(
    metadata: AttentionMetadata, block_size: int, sliding_window: int | None
) -> list[_DecodeGroup]:
    """The step's decode batches; the same for every layer that has this window."""
    key = ("torch", block_size, sliding_window)
    groups: list[_DecodeGroup] | None = metadata.derived.get(key)
    if groups is None:
        groups = [
            _decode_group(metadata, rows, block_size, sliding_window)
            for rows in _split_by_length(metadata.host_context_lengths[: metadata.num_decodes])
        ]
        metadata.derived[key] = groups
    return groups


def _split_by_length(lengths: list[int]) -> list[list[int]]:
    """Rows whose contexts are of like length, so that padding at most doubles the work."""
    groups: list[list[int]] = []
    shortest = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        if (
            not groups
            or length > max(2 * shortest, 256)
            or length * (len(groups[-1]) + 1) > _MAX_GATHERED_TOKENS
        ):
            groups.append([])
            shortest = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _decode_group(
    metadata: AttentionMetadata, rows: list[int], block_size: int, sliding_window: int | None
) -> _DecodeGroup:
    device = metadata.block_tables.device
    lengths = np.array([metadata.host_context_lengths[row] for row in rows])[:, None]
    width = -(-int(lengths.max()) // block_size)
    positions = np.arange(width * block_size)[None, :]
    beyond = positions >= lengths
    visible = ~beyond
    if sliding_window is not None:
        visible &= lengths - 1 - positions < sliding_window
    everything = len(rows) == metadata.num_decodes
    index = None if everything else torch.tensor(rows, device=device)
    tables = metadata.block_tables[: metadata.num_decodes, :width]
    if index is not None:
        tables = tables.index_select(0, index)
    return _DecodeGroup(
        rows=index,
        blocks=tables.flatten().long(),  # gathering by int32 is three times as slow on CPU
        padding=torch.from_numpy(np.flatnonzero(beyond)).to(device),
        mask=torch.from_numpy(visible).to(device)[:, None, None, :],
        size=len(rows),
    )
