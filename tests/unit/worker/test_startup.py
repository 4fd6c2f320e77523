"""What a start does beside the loading, and what it tells of its time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from pagewire.config import EngineConfig
from pagewire_engine.build import build_engine
from pagewire_engine.startup_times import StartupTimes
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.compile_ahead import compile_ahead
from pagewire_engine.worker.cuda_graphs import GraphSizes
from pagewire_engine.worker.device_runner import DeviceRunner
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu.attention import TritonAttention
from pagewire_kernels.gpu.dense import TritonDense
from pagewire_kernels.gpu.launch import compiled_only, launch
from tests.fakes.step_driver import load
from tests.fakes.tiny_models import VOCAB_SIZE


def test_phases_of_a_start_add_up_to_its_time() -> None:
    now = iter([0.0, 1.0, 3.0, 3.0, 3.5, 9.0])
    times = StartupTimes(lambda: next(now))
    with times.phase("imports"):
        pass
    with times.phase("imports"):
        pass
    times.add({"weights": 4.0, "tokenizer": 0.01})
    assert times.seconds == {"imports": 2.5, "weights": 4.0, "tokenizer": 0.01}
    assert str(times) == "9.0 s: imports 2.5, weights 4.0, other 2.5"


def test_a_start_tells_where_its_time_went(tiny_llama: Path) -> None:
    told: list[str] = []
    config = EngineConfig(
        model=str(tiny_llama), device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8
    )
    built = build_engine(config, told.append)
    built.shutdown()
    assert told[-1].startswith("loaded in ")
    assert set(built.info.startup_s) >= {"kernels", "weights", "largest step", "KV blocks"}


@pytest.mark.parametrize("max_num_tokens", [64, 24])  # 24: room for less than what is compiled for
def test_what_steps_launch_is_compiled_and_not_run(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, max_num_tokens: int
) -> None:
    """In bf16, as on a GPU; the launches themselves would fail here."""
    model, _ = load(tiny_llama, dtype=torch.bfloat16)
    device = torch.device("cpu")
    model.use_kernels(TritonDense())
    runner = DeviceRunner(
        model,
        CacheEngine(model.kv_shape, 1, 16, torch.bfloat16, device),
        TritonAttention(dependent_launch=False),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[257],
        device=device,
        max_num_seqs=16,
        max_num_tokens=max_num_tokens,
        max_model_len=128,
    )
    asked: list[str] = []

    def warmup(kernel: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        assert 0 not in grid
        asked.append(kernel.__name__)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "warmup", warmup)
    with recorded() as launched:
        compile_ahead(
            runner,
            GraphSizes([1, 16], [16, max_num_tokens], [128]),
            max_num_seqs=16,
            max_num_tokens=max_num_tokens,
            max_model_len=128,
            block_size=16,
        )
    assert set(asked) >= {
        *("dense_gemv", "dense_skinny", "rms_norm_rows", "silu_and_mul_rows"),
        *("write_rows", "decode_split", "chunk_attention"),
        *("_apply_changes", "_prepare_decodes", "_prepare_parts"),
        *("sampling_chunks", "sampling_rows", "logprobs_chunks", "logprobs_rows"),
    }
    assert not launched


def test_launches_after_the_compiling_run() -> None:
    ran: list[str] = []

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: ran.append("launched")

        def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
            ran.append("compiled")

    with compiled_only():
        launch(Kernel(), (1,))
        # Other threads go on launching.
        other = threading.Thread(target=launch, args=(Kernel(), (1,)))
        other.start()
        other.join()
    launch(Kernel(), (1,))
    assert ran == ["compiled", "launched", "launched"]
