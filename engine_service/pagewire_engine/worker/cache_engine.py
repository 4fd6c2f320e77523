"""Owns the memory of the KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire_engine.models.base import KVShape


class CacheEngine:
    """One tensor for all layers, so that copying a block is one indexed assignment.

    On CPU the pool's pages cost memory only once blocks have been written, since nothing here
    touches them before. What a block held before is never read: attention stops at the context.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        key_caches: one [num_blocks, block_size, num_kv_heads, head_dim] a layer.
        value_caches: the same.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = torch.empty(
            (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim),
            dtype=dtype,
            device=device,
        )
        self.key_caches = [layer[0] for layer in self._pool.unbind(0)]
        self.value_caches = [layer[1] for layer in self._pool.unbind(0)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks in every layer.

        No destination is a source of the same call.
        """
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self._pool.device).unbind(1)
        self._pool[:, :, destinations] = self._pool[:, :, sources]


def bytes_per_block(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block over all layers."""
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return per_token * block_size * dtype.itemsize
