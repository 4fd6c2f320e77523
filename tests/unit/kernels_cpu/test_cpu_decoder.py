"""All layers of a Llama-like model in one call, against the same layers one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire_kernels.cpu_decoder import CpuDecoder
from pagewire_kernels.cpu_dense import CpuDense
from tests.fakes.step_driver import StepDriver, load
from tests.fakes.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("built_kernels")
# Chunks longer than what the feed-forward layer takes at once, and decodes beside them.
LENGTHS = (120, 30, 2)


def run(folder: Path, dtype: torch.dtype, quantize: bool, cache: torch.dtype) -> Any:
    model, description = load(folder, dtype=dtype, quantize=quantize)
    driver = StepDriver(model, description.vocab_size, chunk=110, backend="cpu", cache_dtype=cache)
    prompts = [[(7 * i + n) % description.vocab_size for i in range(n)] for n in LENGTHS]
    return driver.greedy(prompts, 4)


@pytest.mark.parametrize(
    ("name", "dtype", "quantize", "cache"),
    [
        ("llama-llama3-rope-tied", torch.float32, False, torch.float32),
        ("mistral-window", torch.float16, False, torch.bfloat16),
        ("qwen3-head-norms-tied", torch.bfloat16, False, torch.float32),
        ("qwen2-window-in-upper-layers", torch.float32, True, torch.float16),
    ],
)
def test_the_answer_is_that_of_the_layers_one_by_one(
    name: str,
    dtype: torch.dtype,
    quantize: bool,
    cache: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_tiny_model(tmp_path, name)
    calls = []
    whole = CpuDecoder.__call__

    def counted(self: CpuDecoder, *arguments: Any) -> torch.Tensor:
        calls.append(len(arguments[0]))
        return whole(self, *arguments)

    monkeypatch.setattr(CpuDecoder, "__call__", counted)
    outputs, logits = run(tmp_path, dtype, quantize, cache)
    assert max(calls) > 96
    assert min(calls) <= 3
    monkeypatch.setattr(CpuDense, "decoder", lambda *arguments: None)
    called = len(calls)
    expected_outputs, expected = run(tmp_path, dtype, quantize, cache)
    assert len(calls) == called
    assert outputs == expected_outputs
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_what_the_kernels_do_not_read_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    with pytest.raises(ValueError, match=r"none of torch\.float64"):
        run(tmp_path, torch.float32, False, torch.float64)
