"""Weights on their way to a CUDA device: the same numbers as on CPU, however they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.config import EngineConfig
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.weight_loading import load_model, safetensors_source, staging
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import tiny_reference, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FILE = "model.safetensors"


def _load(path: Path, device: str, dtype: torch.dtype, seed: int | None = None) -> CausalLM:
    load_format = "auto" if seed is None else "dummy"
    config = EngineConfig(model=str(path), load_format=load_format)
    files = resolve_model(config)
    return load_model(
        files,
        load_description(files, config),
        dtype=dtype,
        device=torch.device(device),
        dummy_seed=seed,
    )


def _assert_same(one: CausalLM, other: CausalLM) -> None:
    places = other.checkpoint_tensors()
    for name, place in one.checkpoint_tensors().items():
        assert torch.equal(place.cpu(), places[name].cpu()), name


@pytest.mark.parametrize("name", ["llama-llama3-rope-tied", "gpt2-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_bytes", [64, 8 << 20])
def test_files_are_read_to_cuda_as_to_cpu(
    name: str,
    dtype: torch.dtype,
    buffer_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed and transposed places, from fp32 and bf16 files, through buffers of any size."""
    write_tiny_model(tmp_path, name)
    weights = load_file(tmp_path / FILE)
    names = sorted(weights)
    save_file({n: weights[n] for n in names[::2]}, tmp_path / "a.safetensors")
    save_file({n: weights[n].bfloat16() for n in names[1::2]}, tmp_path / "b.safetensors")
    (tmp_path / FILE).unlink()
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(safetensors_source, "BUFFER_BYTES", buffer_bytes)
    _assert_same(_load(tmp_path, "cuda:0", dtype), _load(tmp_path, "cpu", dtype))


def test_a_gguf_is_read_to_cuda_as_to_cpu(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, tiny_reference("qwen2-unused-window-tied"))
    _assert_same(_load(file, "cuda:0", torch.float32), _load(file, "cpu", torch.float32))


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    first, again, other = (_load(tmp_path, "cuda:0", torch.bfloat16, seed) for seed in (3, 3, 4))
    _assert_same(first, again)
    embeddings = [model.input_embedding().weight for model in (first, other)]
    assert not torch.equal(*embeddings)
    assert all(parameter.isfinite().all() for parameter in first.parameters())
