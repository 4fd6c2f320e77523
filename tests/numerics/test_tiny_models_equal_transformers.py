"""Every architecture, through the real model runner, equals transformers in fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire_engine.models.llama import LlamaForCausalLM
from pagewire_kernels.torch_attention import TorchAttention
from tests.fakes.step_driver import StepDriver, load
from tests.fakes.tiny_models import VOCAB_SIZE

NUM_TOKENS = 64
TOLERANCE = 1e-4


def _prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (41, 34, 50)]


def _reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def test_logits_and_greedy_tokens_equal_transformers(tiny: tuple[Path, Any], backend: str) -> None:
    folder, reference = tiny
    model, description = load(folder)
    prompts = _prompts()
    if backend == "cpu" and model.kv_shape.head_dim % 8:
        backend = "auto"  # these heads' size is not for the C++ kernels: torch it is
    driver = StepDriver(model, description.vocab_size, backend=backend)
    outputs, logits = driver.greedy(prompts, NUM_TOKENS)
    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        expected = _reference_logits(reference, prompt + output[:-1])
        decided = expected[len(prompt) - 1 :].topk(2).values
        assert (decided[:, 0] - decided[:, 1]).min() > TOLERANCE, "a tie: use another seed"
        # If each of our tokens is the likeliest after all before it, then by induction they are
        # what greedy decoding gives there.
        assert output == expected[len(prompt) - 1 :].argmax(-1).tolist()
        assert (ours - expected).abs().max() < TOLERANCE


def test_a_backend_may_rotate_while_it_writes(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = tiny
    model, description = load(folder)
    prompt = _prompts()[0]
    calls = []
    rotate_and_write = TorchAttention.rotate_and_write

    def counted(self: TorchAttention, *arguments: torch.Tensor) -> torch.Tensor:
        calls.append(len(arguments))
        return rotate_and_write(self, *arguments)

    monkeypatch.setattr(TorchAttention, "fuses_rotation", True)
    monkeypatch.setattr(TorchAttention, "rotate_and_write", counted)
    _, logits = StepDriver(model, description.vocab_size).greedy([prompt], 1)
    assert (logits[0] - _reference_logits(reference, prompt)).abs().max() < TOLERANCE
    assert bool(calls) == isinstance(model, LlamaForCausalLM)


def test_every_parameter_holds_the_checkpoints_values(tiny: tuple[Path, Any]) -> None:
    folder, reference = tiny
    model, _ = load(folder)
    expected = reference.state_dict()
    places = model.checkpoint_tensors()
    for name, place in places.items():
        assert torch.equal(place, expected[name]), name
    # Together the places are all there is: nothing stays as it was allocated.
    assert sum(place.numel() for place in places.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_zeroing_any_tensor_changes_the_logits(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    model, description = load(folder)
    prompt = _prompts()[0]

    def logits() -> torch.Tensor:
        driver = StepDriver(model, description.vocab_size, num_blocks=16, chunk=len(prompt))
        return driver.greedy([prompt], 1)[1][0]

    whole = logits()
    unnoticed = []
    for name, place in model.checkpoint_tensors().items():
        kept = place.clone()
        place.zero_()
        if not (logits() - whole).abs().max() >= TOLERANCE:
            unnoticed.append(name)
        place.copy_(kept)
    # A key bias adds the same to all scores of a query, which softmax ignores; rotary positions
    # turn it differently at each key, so that only OPT's has no effect.
    assert all(name.endswith("k_proj.bias") for name in unnoticed), unnoticed
    assert bool(unnoticed) == (folder.name in ("opt-norm-before", "opt-norm-after-projected"))
