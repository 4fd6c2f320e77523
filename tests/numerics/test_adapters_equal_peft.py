"""Adapters give what PEFT gives, alone and in a batch of several."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire_engine.adapters.description import AdapterFolder
from pagewire_kernels import build
from tests.fakes.step_driver import StepDriver, load
from tests.fakes.tiny_adapters import ALL_LINEARS, EMBEDDINGS, write_tiny_adapter
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_model

NUM_TOKENS = 12
TOLERANCE = 1e-4
MODELS = (
    "llama-llama3-rope-tied",
    "llama-biases-untied-odd-heads",
    "qwen3-head-norms-tied",
    "opt-norm-after-projected",
    "opt-norm-before",
    "gpt2-tied",
)


def _prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (21, 14, 30, 9, 17)]


def _adapters(kind: str) -> list[dict[str, Any]]:
    """Settings of four adapters that differ in all that changes numbers."""
    linears, embedding = ALL_LINEARS[kind], EMBEDDINGS.get(kind, "embed_tokens")
    return [
        {},
        {"r": 7, "lora_alpha": 3, "use_rslora": True, "target_modules": linears[:1]},
        {
            "r": 2,
            "target_modules": linears[1:],
            "rank_pattern": {linears[1]: 5},
            "alpha_pattern": {f"1.*{linears[2]}": 9},
        },
        {"r": 3, "lora_alpha": 4.5, "target_modules": [embedding, "lm_head", linears[0]]},
    ]


@pytest.fixture(scope="module", params=MODELS)
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path], list[Any]]:
    """A model's folder, its adapters', and transformers' model without and PEFT's with each."""
    folder = tmp_path_factory.mktemp("adapted")
    reference = write_tiny_model(folder / "model", request.param)
    settings = _adapters(reference.config.model_type)
    folders = [folder / f"adapter-{n}" for n in range(len(settings))]
    models = [
        write_tiny_adapter(path, reference, seed=n, **each)
        for n, (path, each) in enumerate(zip(folders, settings, strict=True))
    ]
    return folder / "model", folders, [reference, *models]


@pytest.fixture(scope="session")
def cpp_kernels() -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler; torch's products depend on the batch")
    build.build()


def _driver(adapted: tuple[Path, list[Path], list[Any]], backend: str) -> StepDriver:
    folder, adapters, _ = adapted
    model, description = load(folder)
    if backend == "cpu" and model.kv_shape.head_dim % 8:
        pytest.skip("these heads' size is not for the C++ kernels")
    driver = StepDriver(model, description.vocab_size, backend=backend, max_loras=len(adapters))
    assert driver.adapters is not None
    for number, path in enumerate(adapters, 1):
        driver.adapters.load(number, AdapterFolder(str(path)))
    return driver


def test_a_mixed_batch_gives_what_peft_gives_for_each(
    adapted: tuple[Path, list[Path], list[Any]], backend: str
) -> None:
    driver, models = _driver(adapted, backend), adapted[2]
    numbers = [2, 0, 1, 4, 3]
    prompts = _prompts()
    outputs, logits = driver.greedy(prompts, NUM_TOKENS, numbers)
    for prompt, output, ours, number in zip(prompts, outputs, logits, numbers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + output[:-1]])
            expected = models[number](input_ids=ids, use_cache=False).logits[0]
            base = models[0](ids, use_cache=False).logits[0]
        assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
        if number:
            assert (base - expected).abs().max() > 100 * TOLERANCE, "the adapter changes nothing"


def test_an_adapter_gives_the_same_bits_alone_and_in_any_batch(
    adapted: tuple[Path, list[Path], list[Any]], cpp_kernels: None
) -> None:
    prompts, numbers = _prompts(), [2, 0, 1, 4, 3]
    _, together = _driver(adapted, "cpu").greedy(prompts, 3, numbers)
    for prompt, number, mixed in zip(prompts, numbers, together, strict=True):
        _, alone = _driver(adapted, "cpu").greedy([prompt], 3, [number])
        assert torch.equal(alone[0], mixed)
