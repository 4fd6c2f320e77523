"""How a worker sizes its cache, and what settings it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_engine.model_files import resolve_model
from pagewire_engine.worker import worker as worker_module
from pagewire_engine.worker.worker import Worker, largest_step
from tests.fakes.tiny_models import MAX_POSITIONS, VOCAB_SIZE, write_tiny_model

# 3 layers x keys and values x 2 heads of 8 x 4 bytes
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4


def _worker(folder: Path, **settings: Any) -> Worker:
    fields = {"device": "cpu", "block_size": 4, "num_threads": 1} | settings
    config = EngineConfig(model=str(folder), **fields)
    return Worker(config, resolve_model(config))


def test_the_cache_takes_the_memory_it_is_given(tiny_llama: Path) -> None:
    info = _worker(tiny_llama, kv_cache_memory=40 * 4 * TOKEN_BYTES + 1).info()
    assert info.num_blocks == 40
    assert info.max_model_len == MAX_POSITIONS
    assert (info.vocab_size, info.dtype, info.device) == (VOCAB_SIZE, "float32", "cpu")


def test_no_more_blocks_than_all_sequences_at_their_longest_need(tiny_llama: Path) -> None:
    info = _worker(tiny_llama, kv_cache_memory=1 << 30, max_num_seqs=3, max_model_len=50).info()
    assert info.num_blocks == 3 * 13


def test_the_default_is_a_share_of_free_memory(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "default_cpu_cache_bytes", lambda: 64 * 4 * TOKEN_BYTES)
    assert _worker(tiny_llama).info().num_blocks == 64


def test_a_small_pool_limits_the_sequences(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _worker(tiny_llama, num_gpu_blocks_override=5).info().max_model_len == 20
    assert "128 tokens, but the KV cache holds 20" in caplog.text


def test_a_pool_too_small_for_what_was_asked_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_model_len.*64.*16.*kv_cache_memory"):
        _worker(tiny_llama, num_gpu_blocks_override=4, max_model_len=64)


def test_memory_for_less_than_a_block_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="kv_cache_memory"):
        _worker(tiny_llama, kv_cache_memory=100)


def test_a_missing_device_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FailedPreconditionError, match=r"device.*CUDA.*--device cpu"):
        _worker(tiny_llama, device="cuda")


def test_a_missing_attention_backend_is_named(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagewire_kernels import attention

    monkeypatch.setitem(attention._BACKEND_MODULES, "cpu", "pagewire_kernels.not_there")
    with pytest.raises(FailedPreconditionError, match=r"attention_backend.*'cpu'.*reinstall"):
        _worker(tiny_llama, attention_backend="cpu")
    assert _worker(tiny_llama, attention_backend="auto", num_gpu_blocks_override=4).info()


def test_a_backend_that_cannot_do_the_heads_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagewire_kernels.torch_attention import TorchAttention

    write_tiny_model(tmp_path, "gpt2-untied-layer-scaled")  # heads of 12
    monkeypatch.setattr(TorchAttention, "head_dim_multiple", 8)
    with pytest.raises(FailedPreconditionError, match=r"divisible by 8, not 12.*torch"):
        _worker(tmp_path, attention_backend="torch")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs(tiny_llama: Path, dtype: str) -> None:
    worker = _worker(tiny_llama, dtype=dtype, num_gpu_blocks_override=64)
    plan = largest_step(100, max_num_seqs=8, max_model_len=40, block_size=4)
    result = worker.execute(plan)
    assert len(result.sampled) == 8
    assert worker.info().dtype == dtype


@pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(1, 10), (4, 1000), (256, 16)])
def test_the_largest_step_fills_the_budget_within_the_limits(
    max_num_seqs: int, max_model_len: int
) -> None:
    plan = largest_step(100, max_num_seqs, max_model_len, block_size=8)
    lengths = [part.num_tokens for part in plan.scheduled]
    assert sum(lengths) == min(100, max_num_seqs * max_model_len)
    assert max(lengths) <= max_model_len
    assert len(lengths) <= max_num_seqs
    blocks = [block for part in plan.scheduled for block in part.block_ids]
    assert sorted(blocks) == list(range(len(blocks)))
