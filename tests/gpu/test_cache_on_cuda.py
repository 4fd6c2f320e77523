"""KV blocks on a CUDA device: swapped in the right order, and as many as the memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire_engine.model_files import resolve_model
from pagewire_engine.models.base import KVShape
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.largest_step import largest_step
from pagewire_engine.worker.worker import Worker
from tests.fakes.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = KVShape(num_layers=8, num_kv_heads=4, head_dim=64)
NUM_BLOCKS, BLOCK_SIZE = 1024, 16


def _contents(cache: CacheEngine) -> torch.Tensor:
    return torch.stack([*cache.key_caches, *cache.value_caches], dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swaps_wait_for_what_is_queued_and_are_waited_for(dtype: torch.dtype) -> None:
    """Nothing here waits on the host: blocks are filled late, and overwritten at once."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    cache = CacheEngine(SHAPE, NUM_BLOCKS, BLOCK_SIZE, dtype, cuda, num_cpu_blocks=NUM_BLOCKS)
    every = [*cache.key_caches, *cache.value_caches]
    for tensor in every:
        tensor.normal_()
    before = _contents(cache)
    cache.clear()
    slow = torch.randn(4096, 4096, device=cuda)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    torch.cuda.synchronize()
    for _ in range(40):
        slow = slow @ slow / 64
    for index, tensor in enumerate(every):
        tensor.copy_(before[:, index])
    # More than the buffer holds; host blocks in runs and singly.
    half = NUM_BLOCKS // 2
    cache.swap_out([(block, host) for host, block in enumerate(order[:half])])
    cache.clear()
    cache.swap_in([(host, block) for host, block in enumerate(order[:half])])
    cache.swap_out([(order[i], NUM_BLOCKS - 1 - i) for i in range(half)])
    cache.clear()
    cache.swap_in([(NUM_BLOCKS - 1 - i, i) for i in range(half)])
    after = _contents(cache)
    assert torch.equal(after[:half], before[order[:half]])
    assert not after[half:].any()


def _worker(folder: Path, **settings: Any) -> Worker:
    config = EngineConfig(model=str(folder), device="cuda", **settings)
    return Worker(config, resolve_model(config))


def test_blocks_fill_the_share_of_the_card_and_no_more(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    worker = _worker(tmp_path, gpu_memory_utilization=0.05, max_num_seqs=64)
    free, total = torch.cuda.mem_get_info()
    assert worker.info().num_blocks == 16384
    assert worker.info().num_cpu_blocks == 16384
    assert total - free < 0.05 * total
    del worker
    with pytest.raises(InvalidArgumentError, match=r"gpu_memory_utilization: 0\.0001 of \d"):
        _worker(tmp_path, gpu_memory_utilization=0.0001)
    with pytest.raises(InvalidArgumentError, match=r"num_gpu_blocks_override: .* can't be alloc"):
        _worker(tmp_path, num_gpu_blocks_override=1 << 30, swap_space=0)


def test_the_measured_step_leaves_room_for_the_real_one(tmp_path: Path) -> None:
    """With the pool of that size in place, the largest step runs within the share."""
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    share = 0.04
    _, total = torch.cuda.mem_get_info()
    worker = _worker(tmp_path, gpu_memory_utilization=share, max_num_seqs=64)
    left = worker._left_on_device()
    num_blocks = left // worker._cache_size.block_bytes
    assert num_blocks > 16384
    del worker
    torch.cuda.empty_cache()
    worker = _worker(tmp_path, num_gpu_blocks_override=num_blocks, swap_space=0, max_num_seqs=64)
    worker._runner._cache.clear()
    torch.cuda.reset_peak_memory_stats()
    result = worker.execute(largest_step(8192, 64, worker.info().max_model_len, 16))
    assert len(result.sampled) == 64
    assert torch.cuda.max_memory_allocated() < share * total
