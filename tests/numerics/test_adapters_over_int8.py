"""Adapters of a model whose weights are rounded to int8 give what PEFT gives over such weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire_engine.adapters.description import AdapterFolder
from pagewire_kernels import build
from pagewire_kernels.quantization import quantize_int8
from tests.fakes.step_driver import StepDriver, load
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model

MODELS = ["llama-llama3-rope-tied", "llama-biases-untied-odd-heads"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"r": 7, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    {"r": 3, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
]
PROMPTS = [list(range(3, 24)), [9, 8, 7], list(range(40, 53)), [5] * 9]
NUMBERS = [2, 0, 3, 1]
NUM_TOKENS = 12
# The C++ kernels round the inputs of the base model's linears to 16 bits.
TOLERANCE = {"torch": 1e-4, "cpu": 5e-3}


def rounded(reference: Any) -> Any:
    """transformers' model with the weights that int8 leaves of its own."""
    reference = copy.deepcopy(reference)
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = quantize_int8(module.weight.data).dequantized()
    return reference


@pytest.fixture(scope="module", params=MODELS)
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path], list[Any]]:
    """A model's folder, its adapters', and the rounded model without and with each."""
    folder = tmp_path_factory.mktemp("adapted")
    reference = rounded(write_tiny_model(folder / "model", request.param))
    folders = [folder / f"adapter-{n}" for n in range(len(SETTINGS))]
    models = [
        write_tiny_adapter(path, reference, seed=n, **each)
        for n, (path, each) in enumerate(zip(folders, SETTINGS, strict=True))
    ]
    return folder / "model", folders, [reference, *models]


def driver(adapted: tuple[Path, list[Path], list[Any]], backend: str) -> StepDriver:
    folder, adapters, _ = adapted
    model, description = load(folder, quantize=True)
    if backend == "cpu" and model.kv_shape.head_dim % 8:
        pytest.skip("these heads' size is not for the C++ kernels")
    made = StepDriver(model, description.vocab_size, backend=backend, max_loras=len(adapters))
    assert made.adapters is not None
    for number, path in enumerate(adapters, 1):
        made.adapters.load(number, AdapterFolder(str(path)))
    return made


def test_a_mixed_batch_gives_what_peft_gives_over_the_rounded_weights(
    adapted: tuple[Path, list[Path], list[Any]], backend: str
) -> None:
    outputs, logits = driver(adapted, backend).greedy(PROMPTS, NUM_TOKENS, NUMBERS)
    models, tolerance = adapted[2], TOLERANCE[backend]
    for prompt, output, ours, number in zip(PROMPTS, outputs, logits, NUMBERS, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + output[:-1]])
            expected = models[number](input_ids=ids, use_cache=False).logits[0]
            base = models[0](ids, use_cache=False).logits[0]
        assert (ours - expected).abs().max() < tolerance * expected.abs().max()
        # What was sampled is PEFT's choice, or one that is as good but for the rounding.
        chosen = expected[len(prompt) - 1 :].gather(1, torch.tensor(output)[:, None]).squeeze(1)
        best = expected[len(prompt) - 1 :].amax(dim=1)
        assert (best - chosen).max() < 2 * tolerance * expected.abs().max()
        if number:
            assert (base - expected).abs().max() > 20 * tolerance * expected.abs().max()


def test_an_adapter_gives_the_same_bits_alone_and_in_any_batch(
    adapted: tuple[Path, list[Path], list[Any]],
) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler; torch's products depend on the batch")
    build.build()
    _, together = driver(adapted, "cpu").greedy(PROMPTS, 4, NUMBERS)
    for prompt, number, mixed in zip(PROMPTS, NUMBERS, together, strict=True):
        _, alone = driver(adapted, "cpu").greedy([prompt], 4, [number])
        assert torch.equal(alone[0], mixed)
