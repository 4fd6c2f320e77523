"""Copies of KV blocks, on the device and to host memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_engine.models.base import KVShape
from pagewire_engine.worker import cache_engine
from pagewire_engine.worker.cache_engine import CacheEngine, bytes_per_block

CPU = torch.device("cpu")
SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=4)
BLOCK_SIZE = 5


def _filled(
    num_blocks: int, num_cpu_blocks: int = 0, dtype: torch.dtype = torch.float32
) -> CacheEngine:
    cache = CacheEngine(SHAPE, num_blocks, BLOCK_SIZE, dtype, CPU, num_cpu_blocks)
    for tensor in [*cache.key_caches, *cache.value_caches]:
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def _contents(cache: CacheEngine) -> torch.Tensor:
    """A copy of all blocks: [num_blocks, layers of keys and of values, ...]."""
    return torch.stack([*cache.key_caches, *cache.value_caches], dim=1)


def test_blocks_are_copied_in_every_layer_and_nothing_else_changes() -> None:
    cache = _filled(6)
    before = _contents(cache)
    cache.copy_blocks([(1, 4), (1, 5), (2, 0)])
    assert torch.equal(_contents(cache), before[[2, 1, 2, 3, 1, 1]])


def test_blocks_of_fp8_are_copied_and_swapped_as_they_are() -> None:
    cache = _filled(6, num_cpu_blocks=2, dtype=torch.float8_e4m3fn)
    before = _contents(cache).view(torch.uint8)
    cache.copy_blocks([(1, 4)])
    cache.swap_out([(2, 1)])
    cache.swap_in([(1, 5)])
    assert torch.equal(_contents(cache).view(torch.uint8), before[[0, 1, 2, 3, 1, 2]])


def test_bytes_of_a_block_are_what_the_pool_takes() -> None:
    cache = CacheEngine(SHAPE, 6, 5, torch.bfloat16, CPU)
    taken = sum(t.numel() * t.element_size() for t in [*cache.key_caches, *cache.value_caches])
    assert taken == 6 * bytes_per_block(SHAPE, 5, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks_of_buffer", [1, 2, 100])
def test_blocks_come_back_from_host_memory_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, blocks_of_buffer: int, dtype: torch.dtype
) -> None:
    block_bytes = bytes_per_block(SHAPE, BLOCK_SIZE, dtype)
    monkeypatch.setattr(cache_engine, "_STAGING_BYTES", blocks_of_buffer * block_bytes)
    monkeypatch.setattr(cache_engine, "_HOST_PIECE_BYTES", 2 * block_bytes)
    cache = _filled(8, num_cpu_blocks=6, dtype=dtype)
    before = _contents(cache)
    cache.swap_out([(7, 0), (1, 1), (2, 2), (5, 5), (0, 3)])
    for tensor in [*cache.key_caches, *cache.value_caches]:
        tensor.fill_(torch.nan)
    cache.swap_in([(5, 1), (0, 0), (1, 7), (2, 2), (3, 6)])
    after = _contents(cache)
    assert torch.equal(after[[0, 1, 2, 6, 7]], before[[7, 5, 2, 0, 1]])
    assert after[[3, 4, 5]].isnan().all()


def test_host_memory_is_allocated_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[tuple[int, ...]] = []

    def new(blocks: object, shape: tuple[int, ...]) -> torch.Tensor:
        pieces.append(shape)
        return torch.empty(shape)

    monkeypatch.setattr(cache_engine._HostBlocks, "_new", new)
    block_bytes = bytes_per_block(SHAPE, BLOCK_SIZE, torch.float32)
    monkeypatch.setattr(cache_engine, "_HOST_PIECE_BYTES", 4 * block_bytes)
    cache = _filled(6, num_cpu_blocks=10)
    assert pieces == []
    cache.swap_out([(0, 9), (1, 0)])
    assert [shape[0] for shape in pieces] == [2, 4]
    cache.swap_in([(9, 2), (0, 3)])
    assert len(pieces) == 2


def test_a_swap_touches_no_other_block() -> None:
    cache = _filled(6, num_cpu_blocks=4)
    before = _contents(cache)
    cache.swap_out([(1, 3), (2, 0)])
    assert torch.equal(_contents(cache), before)
    cache.swap_in([(3, 5)])
    assert torch.equal(_contents(cache), before[[0, 1, 2, 3, 4, 1]])


@settings(deadline=None)  # a busy machine is none of its business
@given(st.data())
def test_any_swaps_and_copies_do_what_one_at_a_time_would(data: st.DataObject) -> None:
    """Against two lists of blocks: device and host memory hold what was last copied there."""
    num_blocks, num_cpu_blocks = 5, 4
    cache = _filled(num_blocks, num_cpu_blocks)
    initial = _contents(cache)
    device: list[int] = list(range(num_blocks))  # which initial block each holds now
    host: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        targets = data.draw(st.lists(st.sampled_from(range(num_cpu_blocks)), unique=True))
        out = [(data.draw(st.sampled_from(range(num_blocks))), target) for target in targets]
        cache.swap_out(out)
        host |= {target: device[source] for source, target in out}
        places = data.draw(st.lists(st.sampled_from(range(num_blocks)), unique=True))
        back = [(data.draw(st.sampled_from(sorted(host))), place) for place in places if host]
        cache.swap_in(back)
        for source, place in back:
            device[place] = host[source]
    assert torch.equal(_contents(cache), initial[device])
