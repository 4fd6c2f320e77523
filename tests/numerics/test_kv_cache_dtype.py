"""Keys and values kept in fewer bits than the model computes in: what that costs is bounded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pagewire_kernels.attention import AttentionMetadata, load_attention_backend
from tests.fakes.step_driver import CPU, StepDriver, load
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_model

# Half the distance of two neighbours, relative to them.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
cache_dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 4, 2, 16


def _attend(backend: str, dtype: torch.dtype, rounded: torch.dtype) -> torch.Tensor:
    """A decode and a chunk in fp32, over keys and values rounded once and kept in `dtype`."""
    attention = load_attention_backend(backend, CPU, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    tables = np.random.default_rng(0).permutation(NUM_BLOCKS).reshape(2, 8).astype(np.int32)
    contexts = [30, 27]
    key, value = torch.randn(2, sum(contexts), NUM_KV_HEADS, HEAD_DIM, generator=generator)
    slots = [
        int(tables[s, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE
        for s, context in enumerate(contexts)
        for i in range(context)
    ]
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_cache, value_cache = torch.full(shape, torch.nan, dtype=dtype)
    attention.write_kv(
        key.to(rounded).float(),
        value.to(rounded).float(),
        key_cache,
        value_cache,
        torch.tensor(slots),
    )
    metadata = AttentionMetadata.from_host(
        np.array([0, 1, 20], np.int32),
        np.array(contexts, np.int32),
        tables,
        np.array(slots[contexts[0] - 1 :][:20], np.int64),
        num_decodes=1,
    )
    query = torch.randn(20, 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator)
    return attention.paged_attention(query, key_cache, value_cache, metadata, HEAD_DIM**-0.5)


@cache_dtypes
def test_rounding_to_the_cache_is_all_that_is_lost(backend: str, dtype: torch.dtype) -> None:
    ours = _attend(backend, dtype, rounded=torch.float32)
    assert ours.dtype == torch.float32
    # Rounded before or on the way into the cache is the same, and nothing is rounded elsewhere.
    assert torch.equal(ours, _attend(backend, dtype, rounded=dtype))
    torch.testing.assert_close(
        ours, _attend(backend, torch.float32, rounded=dtype), rtol=1e-6, atol=1e-6
    )
    exact = _attend(backend, torch.float32, rounded=torch.float32)
    error = (ours - exact).abs().max().item()
    # Weights move with the scores, outputs with the values, each by a few roundings.
    assert ROUNDING[dtype] / 10 < error < 8 * ROUNDING[dtype]


@cache_dtypes
def test_a_models_logits_move_by_little(backend: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (41, 34)]

    def logits(cache_dtype: torch.dtype) -> torch.Tensor:
        model, description = load(tmp_path)
        driver = StepDriver(model, description.vocab_size, backend=backend, cache_dtype=cache_dtype)
        # Chunks of seven: all but the first read what earlier ones left in the cache.
        return torch.cat(driver.greedy(prompts, 1)[1])

    exact = logits(torch.float32)
    difference = logits(dtype) - exact
    spread = exact.std().item()
    # Through three layers of weights that amplify, on the mean and at worst.
    assert ROUNDING[dtype] / 10 < difference.square().mean().sqrt() / spread < 8 * ROUNDING[dtype]
    assert difference.abs().max() / spread < 100 * ROUNDING[dtype]
