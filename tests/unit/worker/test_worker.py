"""How a worker sizes its cache, and what settings it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_engine.model_files import resolve_model
from pagewire_engine.step import StepResult
from pagewire_engine.worker import cache_size
from pagewire_engine.worker import worker as worker_module
from pagewire_engine.worker.cache_engine import staging_bytes
from pagewire_engine.worker.largest_step import largest_step
from pagewire_engine.worker.memory import DeviceMemory
from pagewire_engine.worker.worker import Worker
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


def test_no_more_blocks_than_sequences_at_their_longest_need_or_prefixes_may(
    tiny_llama: Path,
) -> None:
    settings = {"kv_cache_memory": 1 << 30, "max_num_seqs": 3, "max_model_len": 50}
    info = _worker(tiny_llama, **settings, enable_prefix_caching=False).info()
    assert info.num_blocks == 3 * 13
    assert _worker(tiny_llama, **settings).info().num_blocks == 16384


def test_more_memory_than_is_free_is_warned_of(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_size, "available_bytes", lambda: 1 << 20)
    _worker(tiny_llama, kv_cache_memory=1 << 20)
    assert not caplog.messages
    _worker(tiny_llama, kv_cache_memory="2MiB")
    assert "kv_cache_memory is 2.0 MiB, but only 1.0 MiB are free" in caplog.text
    caplog.clear()
    _worker(tiny_llama, num_gpu_blocks_override=40, swap_space="1MiB")
    assert not caplog.messages
    _worker(tiny_llama, num_gpu_blocks_override=40, swap_space="3MiB")
    assert "swap_space is 3.0 MiB, but only 1.0 MiB are free" in caplog.text


def test_host_memory_for_swapped_blocks(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(**settings: Any) -> int:
        return _worker(tiny_llama, num_gpu_blocks_override=40, **settings).info().num_cpu_blocks

    monkeypatch.setattr(cache_size, "default_swap_bytes", lambda device: 30 * 4 * TOKEN_BYTES)
    assert blocks() == 30
    monkeypatch.setattr(cache_size, "default_swap_bytes", lambda device: 1 << 30)
    assert blocks() == 40
    assert blocks(swap_space=0) == 0
    assert blocks(swap_space=50 * 4 * TOKEN_BYTES + 1) == 50
    # Never more than all running sequences could fill.
    assert blocks(swap_space="1GiB", max_num_seqs=2, max_model_len=100) == 50


@pytest.mark.parametrize("settings", [{"swap_space": 100}, {"preemption_mode": "swap"}])
def test_no_host_memory_where_some_was_wanted_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(cache_size, "default_swap_bytes", lambda device: 0)
    with pytest.raises(InvalidArgumentError, match=r"^swap_space: one block of 4 tokens takes"):
        _worker(tiny_llama, num_gpu_blocks_override=40, **settings)


def test_a_cache_that_cannot_be_allocated_names_the_setting(tiny_llama: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^num_gpu_blocks_override: .* GiB of KV blocks on cpu"
    ):
        _worker(tiny_llama, num_gpu_blocks_override=1 << 50, swap_space=0)


def test_the_largest_step_decides_what_a_gpu_has_left(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[StepResult] = []

    def measure(run: Callable[[], StepResult], device: torch.device) -> DeviceMemory:
        results.append(run())
        return DeviceMemory(total=1 << 30, used=100 << 20, outside=50 << 20)

    monkeypatch.setattr(worker_module, "measure_largest_step", measure)
    worker = _worker(
        tiny_llama, max_num_seqs=6, max_num_batched_tokens=300, gpu_memory_utilization=0.5
    )
    left = worker._left_on_device()
    staging = staging_bytes(4 * TOKEN_BYTES)
    assert left == (512 - 150) * (1 << 20) - staging
    assert 31 << 20 < staging <= 32 << 20
    # The step ran to its end: a token for each sequence, with its costly logprobs.
    assert [len(token.logprobs.top) for token in results[0].sampled if token.logprobs] == [5] * 6
    assert not results[0].failed


def test_the_default_is_a_share_of_free_memory(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_size, "default_cpu_cache_bytes", lambda: 64 * 4 * TOKEN_BYTES)
    assert _worker(tiny_llama).info().num_blocks == 64


def test_a_small_pool_limits_the_sequences(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _worker(tiny_llama, num_gpu_blocks_override=5).info().max_model_len == 20
    assert "128 tokens, but the KV cache holds 20" in caplog.text
    assert "raise num_gpu_blocks_override for longer ones" in caplog.text


def test_a_pool_too_small_for_what_was_asked_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_model_len.*64.*16.*raise num_gpu_blocks"):
        _worker(tiny_llama, num_gpu_blocks_override=4, max_model_len=64)


def test_memory_for_less_than_a_block_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^kv_cache_memory: it leaves 100 bytes.*takes 1536 bytes"
    ):
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


def test_a_cache_of_smaller_numbers_holds_more_blocks(tiny_llama: Path) -> None:
    memory = 40 * 4 * TOKEN_BYTES
    settings = {"kv_cache_memory": memory, "swap_space": memory, "max_model_len": 64}
    info = _worker(tiny_llama, kv_cache_dtype="bfloat16", **settings).info()
    assert (info.num_blocks, info.num_cpu_blocks, info.dtype) == (80, 80, "float32")
    info = _worker(tiny_llama, kv_cache_dtype="float32", dtype="bfloat16", **settings).info()
    assert (info.num_blocks, info.num_cpu_blocks, info.dtype) == (40, 40, "bfloat16")
    # Beside weights of 8 bits 16 are enough, unless more are asked for.
    for asked, blocks in [("auto", 80), ("float32", 40)]:
        worker = _worker(tiny_llama, kv_cache_dtype=asked, quantization="int8", **settings)
        assert worker.info().num_blocks == blocks


def test_a_cache_of_fp8_needs_a_gpu(tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype: fp8 needs a CUDA device"):
        _worker(tiny_llama, kv_cache_dtype="fp8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs(tiny_llama: Path, dtype: str) -> None:
    worker = _worker(tiny_llama, dtype=dtype, num_gpu_blocks_override=64)
    plan = largest_step(100, max_num_seqs=8, max_model_len=40, block_size=4)
    result = worker.execute(plan)
    assert len(result.sampled) == 8
    assert worker.info().dtype == dtype
