"""Rotary tables where they must differ from transformers' length-dependent ones."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewire_engine.models.rotary import RotaryTable

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}


def _config(**rope: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=32, rope_parameters=rope
    )


def test_dynamic_scaling_depends_on_the_position_alone() -> None:
    config = _config(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    table = RotaryTable(config, 64, torch.float32)
    for position in (0, 31, 32, 63):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, device="cpu", seq_len=position + 1)
        torch.testing.assert_close(table.cos[position], (position * frequencies).cos())
    # A longer limit changes no earlier position: resubmitting to another engine goes on the same.
    longer = RotaryTable(config, 60, torch.float32)
    assert torch.equal(longer.cos, table.cos[:60])


def test_longrope_takes_its_factors_by_the_engines_limit() -> None:
    config = _config(**LONGROPE)
    for limit, length in ((32, 32), (64, 33)):
        frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        table = RotaryTable(config, limit, torch.float32)
        expected = torch.outer(torch.arange(limit).float(), frequencies).sin() * factor
        torch.testing.assert_close(table.sin, expected)


def test_tables_are_kept_in_fp32_and_handed_out_in_the_models_dtype() -> None:
    config = _config(rope_type="default", rope_theta=10000.0)
    exact = RotaryTable(config, 4096, torch.float32)
    rounded = RotaryTable(config, 4096, torch.bfloat16)
    assert torch.equal(rounded.cos, exact.cos)
    positions = torch.tensor([5, 4095])
    cos, sin = rounded(positions).angles
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert torch.equal(sin, exact(positions).angles[1].bfloat16())
    assert (cos.shape, sin.shape) == ((2, 1, 8), (2, 1, 4))
