"""A model written as GGUF and as safetensors is the same model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.fakes.step_driver import StepDriver, load
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import tiny_reference, write_tiny_model

PROMPT = list(range(3, 40))


def _logits(path: Path) -> torch.Tensor:
    model, description = load(path)
    driver = StepDriver(model, description.vocab_size, num_blocks=32)
    return driver.greedy([PROMPT], 8)[1][0]


@pytest.mark.parametrize(
    "name",
    [
        "llama-llama3-rope-tied",
        "qwen2-unused-window-tied",
        "qwen3-head-norms-tied-without-bias",
    ],
)
def test_gguf_and_safetensors_give_the_same_logits(name: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "tiny.gguf"
    reference = write_tiny_model(folder, name)
    write_tiny_gguf(file, reference)
    torch.testing.assert_close(_logits(file), _logits(folder), atol=2e-4, rtol=0)


def test_quantised_blocks_are_unpacked_as_the_gguf_package_does(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    reference = tiny_reference("llama-quantisable")
    write_tiny_gguf(file, reference, quantisation=gguf.GGMLQuantizationType.Q8_0)
    model, _ = load(file)
    for name, place in model.checkpoint_tensors().items():
        original = reference.state_dict()[name].numpy()
        if original.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            original = gguf.dequantize(gguf.quantize(original, kind), kind)
        np.testing.assert_array_equal(place.numpy(), original, err_msg=name)
