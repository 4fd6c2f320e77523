"""Weights are rounded to int8 while they are read, whatever they are read from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import Linear, LMHead, MatrixLayer
from pagewire_engine.models.weight_loading import load_model
from pagewire_engine.worker import worker as worker_module
from pagewire_engine.worker.worker import Worker
from pagewire_kernels import build
from pagewire_kernels.attention import load_attention_backend
from pagewire_kernels.dense import load_dense_backend
from pagewire_kernels.quantization import Int8Weight, quantize_int8
from tests.fakes.step_driver import CPU, StepDriver, load
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import tiny_reference, write_tiny_model

MODELS = ["llama-biases-untied-odd-heads", "llama-llama3-rope-tied", "gpt2-tied", "opt-norm-before"]


@pytest.mark.parametrize("name", MODELS)
def test_what_multiplies_is_rounded_and_the_rest_is_not(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path, name)
    exact, quantized = load(tmp_path)[0], load(tmp_path, quantize=True)[0]
    shared = quantized.input_embedding() if quantized.lm_head.tied else None
    modules = dict(exact.named_modules())
    rounded = 0
    for path, layer in quantized.named_modules():
        if not isinstance(layer, MatrixLayer) or (layer is quantized.lm_head and shared):
            continue
        original = modules[path].weight
        if isinstance(layer, Linear | LMHead) or layer is shared:
            expected = quantize_int8(original)
            assert isinstance(layer.matrix, Int8Weight)
            assert torch.equal(layer.matrix.values, expected.values)
            assert torch.equal(layer.matrix.scales, expected.scales)
            assert "weight" not in dict(layer.named_parameters())
            rounded += 1
        else:
            assert torch.equal(layer.matrix, original)
    assert rounded > 6


def test_gguf_and_dummy_weights_are_rounded_too(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_reference("llama-quantisable"))
    for config in (
        EngineConfig(model=str(tmp_path / "tiny.gguf")),
        EngineConfig(model=str(tmp_path / "tiny.gguf"), load_format="dummy"),
    ):
        files = resolve_model(config)
        model = load_model(
            files,
            load_description(files, config),
            dtype=torch.float32,
            device=CPU,
            dummy_seed=1 if config.load_format == "dummy" else None,
            quantize=True,
        )
        assert isinstance(model.lm_head.matrix, Int8Weight)


@pytest.fixture
def built() -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_compute_what_torch_does(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path, name)
    prompts = [list(range(3, 30)), [9, 8, 7]]
    logits = []
    for backend in ("torch", "cpu"):
        model, description = load(tmp_path, quantize=True)
        driver = StepDriver(model, description.vocab_size, backend=backend)
        logits.append(driver.greedy(prompts, 6)[1])
    for reference, ours in zip(*logits, strict=True):
        # The kernels round the inputs of linears to 16 bits.
        assert (ours - reference).square().mean().sqrt() < 1e-3 * reference.std()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", [{"quantize": True}, {"dtype": torch.bfloat16}], ids=str)
def test_a_request_gets_the_same_bits_alone_and_among_others(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    write_tiny_model(tmp_path, "qwen2-window-in-upper-layers")
    prompts = [list(range(3, 30)), [9, 8, 7], list(range(100, 145))]
    model, description = load(tmp_path, **kind)

    def logits(of: list[list[int]]) -> list[torch.Tensor]:
        return StepDriver(model, description.vocab_size, backend="cpu").greedy(of, 8)[1]

    together = logits(prompts)
    for prompt, ours in zip(prompts, together, strict=True):
        assert torch.equal(logits([prompt])[0], ours)


def test_a_device_without_kernels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    config = EngineConfig(model=str(tmp_path), quantization="int8")
    monkeypatch.setattr(worker_module, "find_device", lambda name: torch.device("cuda", 0))
    with pytest.raises(FailedPreconditionError, match=r"quantization.*CPUs only.*--device cpu"):
        Worker(config, resolve_model(config))


def load_wide_model(folder: Path, quantize: bool, size: int = 512) -> CausalLM:
    """8 layers, each 10 MiB in fp32 unless the size is another."""
    LlamaConfig(
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=320,
    ).save_pretrained(folder)
    config = EngineConfig(model=str(folder), load_format="dummy", skip_tokenizer_init=True)
    files = resolve_model(config)
    return load_model(
        files,
        load_description(files, config),
        dtype=torch.float32,
        device=CPU,
        dummy_seed=0,
        dense=load_dense_backend(load_attention_backend("auto", CPU).name, CPU),
        quantize=quantize,
    )


def grown_mib(folder: Path, quantize: bool) -> float:
    """By how much loading raises the peak memory of a new process."""
    program = """if True:
        import sys
        from pathlib import Path
        from tests.unit.worker.test_quantized_loading import load_wide_model

        def peak_kib():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

        folder, quantize = Path(sys.argv[1]), sys.argv[2] == "int8"
        load_wide_model(folder, quantize, size=64)  # what is loaded once is not counted
        before = peak_kib()
        load_wide_model(folder, quantize)
        print((peak_kib() - before) / 1024)
        """
    command = [sys.executable, "-c", program, str(folder), "int8" if quantize else "none"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_unrounded_weights_are_never_in_memory_together(tmp_path: Path) -> None:
    """84 MiB in fp32; 21 as int8, and what the allocator keeps of the larger ones before: up to
    four layers of 10, as its threads have it. Kept together they would be over 100."""
    assert grown_mib(tmp_path, False) > 80
    assert grown_mib(tmp_path, True) < 76
