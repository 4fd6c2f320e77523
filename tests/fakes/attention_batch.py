"""Batches for attention backends: random blocks, strided rows, and NaN where nobody may read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad

from pagewire_kernels.attention import AttentionMetadata, DeviceCounts


@dataclass
class Batch:
    """What a layer gives to its attention backend."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata


def make_batch(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Batch:
    """Decodes by context length, chunks by (context length, new tokens); blocks in random order.

    A context of 0 is a row of padding, which has no slot. Slots that no sequence owns hold NaN: who
    reads them shows it.
    """
    random = np.random.default_rng(0)
    contexts = decodes + [context for context, _ in chunks]
    lengths = [1] * len(decodes) + [new for _, new in chunks]
    blocks = [-(-context // block_size) for context in contexts]
    order = random.permutation(sum(blocks) + 3)
    tables = np.zeros((len(contexts), max(1, *blocks)), np.int32)
    slots: list[int] = []
    owned: list[int] = []
    used = 0
    for s, (context, new) in enumerate(zip(contexts, lengths, strict=True)):
        tables[s, : blocks[s]] = order[used : used + blocks[s]]
        used += blocks[s]
        places = [
            int(tables[s, i // block_size]) * block_size + i % block_size for i in range(context)
        ]
        owned += places
        slots += places[context - new :] if context else [-1] * new
    generator = torch.Generator().manual_seed(1)
    shape = (sum(blocks) + 3, block_size, num_kv_heads, head_dim)
    caches = []
    for _ in range(2):
        cache = torch.full(shape, torch.nan)
        cache.flatten(0, 1)[owned] = torch.randn(
            len(owned), num_kv_heads, head_dim, generator=generator
        )
        caches.append(cache.to(cache_dtype or dtype).to(device))
    # Rows strided as in a packed qkv projection.
    width = (num_heads + 2 * num_kv_heads) * head_dim
    packed = torch.randn(sum(lengths), width, generator=generator).to(dtype).to(device)
    heads = packed.view(sum(lengths), -1, head_dim)
    metadata = AttentionMetadata.from_host(
        np.cumsum([0, *lengths]).astype(np.int32),
        np.array(contexts, np.int32),
        tables,
        np.array(slots, np.int64),
        len(decodes),
        device,
    )
    return Batch(
        query=heads[:, :num_heads],
        key=heads[:, num_heads : num_heads + num_kv_heads],
        value=heads[:, num_heads + num_kv_heads :],
        key_cache=caches[0],
        value_cache=caches[1],
        metadata=metadata,
    )


def on_device(batch: Batch, sequences: int, tokens: int) -> Batch:
    """The batch in a graph's inputs, of more sequences and rows than it has; the host knows none
    of its lengths."""
    told, rows = batch.metadata, len(batch.query)
    count = len(told.context_lengths)
    more, more_rows = sequences - count, tokens - rows
    num_decodes = torch.tensor([told.num_decodes], dtype=torch.int32, device=batch.query.device)
    metadata = AttentionMetadata(
        query_start_locations=pad(told.query_start_locations, (0, more), value=rows),
        context_lengths=pad(told.context_lengths, (0, more)),
        block_tables=pad(told.block_tables, (0, 0, 0, more), value=2**30),
        slot_mapping=pad(told.slot_mapping, (0, more_rows), value=-1),
        num_decodes=min(sequences, tokens),
        host_query_start_locations=[],
        host_context_lengths=[],
        on_device=DeviceCounts(num_decodes, max_chunks=count - told.num_decodes + 1),
    )
    query = pad(batch.query, (0, 0, 0, 0, 0, more_rows), value=math.nan)
    return replace(batch, query=query, metadata=metadata)
