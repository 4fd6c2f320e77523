"""What a start does beside the loading, and what it tells of its time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire_engine.build import build_engine
from pagewire_engine.startup_times import StartupTimes
from pagewire_engine.worker import kernels as kernels_module
from pagewire_kernels.dense import TorchDense
from pagewire_kernels.torch_attention import TorchAttention
from pagewire_kernels.warm_up import WarmUpShapes, compile_ahead

SHAPES = WarmUpShapes(
    device=torch.device("cpu"),
    dtype=torch.float32,
    cache_dtype=torch.float32,
    hidden_size=48,
    intermediate_size=80,
    vocab_size=320,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    sliding_windows=(None,),
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=512,
    max_model_len=128,
)


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


class _Compiled:
    """A backend whose kernels note that they were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def warm_up(self, shapes: WarmUpShapes) -> list[Callable[[], object]]:
        return [lambda n=n: self.asked.append(n) for n in range(shapes.num_kv_heads)]  # type: ignore[misc]


class _Broken:
    def warm_up(self, shapes: WarmUpShapes) -> list[Callable[[], object]]:
        return [self._fail]

    def _fail(self) -> None:
        raise ValueError("no such argument")


def test_kernels_are_asked_for_of_backends_that_have_some(caplog: pytest.LogCaptureFixture) -> None:
    backend = _Compiled()
    with caplog.at_level(logging.WARNING):
        assert compile_ahead([TorchAttention(), _Broken(), backend, TorchDense()], SHAPES) == 3
    assert backend.asked == [0, 1]
    assert "can't be compiled ahead: no such argument" in caplog.text
    assert compile_ahead([TorchAttention(), TorchDense()], SHAPES) == 0


def test_kernels_are_compiled_while_weights_load(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step waits for them: it must not be the one that compiles."""
    seen: list[tuple[WarmUpShapes, str]] = []

    def compile_all(backends: object, shapes: WarmUpShapes) -> int:
        seen.append((shapes, threading.current_thread().name))
        return 0

    monkeypatch.setattr(kernels_module, "compile_ahead", compile_all)
    config = EngineConfig(
        model=str(tiny_llama), device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8
    )
    build_engine(config, lambda line: None).shutdown()
    [(shapes, thread)] = seen
    assert shapes == SHAPES
    assert thread != threading.main_thread().name
