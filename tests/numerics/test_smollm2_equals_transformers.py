"""The embedded model, read from its GGUF, equals transformers on the same dequantised weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from pagewire.pooling import PoolingParams
from pagewire_engine.tokenizer_files import load_tokenizer_files
from tests.fakes.pooling_driver import PoolingDriver
from tests.fakes.smollm2 import smollm2_reference
from tests.fakes.step_driver import StepDriver, load

NUM_TOKENS = 64
# Logits go up to 30; thirty layers of fp32 in another order of summation.
TOLERANCE = 1e-3
PROMPTS = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "The tides of the sea follow the moon, because",
]


@pytest.fixture(scope="module")
def model_path(smollm2_path: Path) -> Path:
    chosen = os.environ.get("PAGEWIRE_TEST_MODEL")
    return Path(chosen) if chosen else smollm2_path


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    return smollm2_reference(model_path)


def test_weights_logits_and_greedy_tokens_equal_transformers(
    model_path: Path, reference: Any, backend: str
) -> None:
    files = load_tokenizer_files(model_path.parent, model_path, mode="auto")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    model, description = load(model_path)
    expected_weights = reference.state_dict()
    for name, place in model.checkpoint_tensors().items():
        assert torch.equal(place, expected_weights[name]), name
    driver = StepDriver(
        model, description.vocab_size, block_size=16, num_blocks=32, chunk=16, backend=backend
    )
    outputs, logits = driver.greedy(prompts, NUM_TOKENS)
    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + output[:-1]])
            expected = reference(ids, use_cache=False).logits[0]
        assert (ours - expected).abs().max() < TOLERANCE
        decided = expected[len(prompt) - 1 :].topk(2).values
        assert (decided[:, 0] - decided[:, 1]).min() > TOLERANCE, "a tie: use another prompt"
        assert output == expected[len(prompt) - 1 :].argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(outputs[0])


@pytest.mark.slow
def test_the_last_tokens_hidden_state_is_its_embedding(model_path: Path, reference: Any) -> None:
    """After the final norm, and the same whether it came in chunks, beside others, or had its
    beginning in the cache."""
    files = load_tokenizer_files(model_path.parent, model_path, mode="auto")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    with PoolingDriver(model_path, runner="pooling", max_num_batched_tokens=16) as driver:
        first = driver.vectors(prompts)
        (again,) = driver.vectors(prompts[:1])
        raw = driver.vectors(prompts, PoolingParams(use_activation=False))
        stats = driver.built.engine.stats()
    assert stats.num_prefill_chunks > 2
    assert stats.prefix_cache_hits > 0
    for prompt, unit, whole in zip(prompts, first, raw, strict=True):
        with torch.inference_mode():
            expected = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        # The hidden states go up to 100.
        assert (torch.tensor(whole) - expected).abs().max() < TOLERANCE
        expected = torch.nn.functional.normalize(expected, dim=0)
        assert (torch.tensor(unit) - expected).abs().max() < 1e-5
    assert (torch.tensor(again) - torch.tensor(first[0])).abs().max() < 1e-6
