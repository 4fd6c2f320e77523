"""Copies of KV blocks."""

from __future__ import annotations

import torch

from pagewire_engine.models.base import KVShape
from pagewire_engine.worker.cache_engine import CacheEngine, bytes_per_block


def test_blocks_are_copied_in_every_layer_and_nothing_else_changes() -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=4)
    cache = CacheEngine(shape, 6, 5, torch.float32, torch.device("cpu"))
    every = [*cache.key_caches, *cache.value_caches]
    for tensor in every:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in every]
    cache.copy_blocks([(1, 4), (1, 5), (2, 0)])
    for tensor, old in zip(every, before, strict=True):
        assert torch.equal(tensor, old[[2, 1, 2, 3, 1, 1]])


def test_bytes_of_a_block_are_what_the_pool_takes() -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=4)
    cache = CacheEngine(shape, 6, 5, torch.bfloat16, torch.device("cpu"))
    taken = sum(t.numel() * t.element_size() for t in [*cache.key_caches, *cache.value_caches])
    assert taken == 6 * bytes_per_block(shape, 5, torch.bfloat16)
