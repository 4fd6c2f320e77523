"""Usual configs are read as transformers reads them, without importing it; others are its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.models.llama_config import LLAMA_TYPES, usual_config
from pagewire_engine.models.rotary import RotaryTable, head_dim_of
from tests.fakes.tiny_models import TINY_MODELS

LLAMAS = {name: each for name, each in TINY_MODELS.items() if each[0] in LLAMA_TYPES}
EIGHT_B = json.loads(Path("tests/bench/data/llama8b/config.json").read_text())
USUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 8b": ("llama", EIGHT_B),
    "old names": (
        "llama",
        EIGHT_B
        | {
            "rope_scaling": {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
            "eos_token_id": [1, 2],
            "head_dim": None,
            "num_key_value_heads": None,
        },
    ),
    **{
        name: each
        for name, each in LLAMAS.items()
        if each[1].get("rope_parameters", {}).get("rope_type", "default") in ("default", "llama3")
    },
}
UNUSUAL: list[dict[str, Any]] = [
    {"hidden_size": "wide"},
    {"hidden_size": 4095},
    {"num_attention_heads": 0},
    {"head_dim": 127},
    {"rms_norm_eps": None},
    {"torch_dtype": "float64"},
    {"tie_word_embeddings": 1},
    {"eos_token_id": "x"},
    {"rope_theta": None},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    {"rope_scaling": [1]},
    {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    {"partial_rotary_factor": 0.5},
    {"layer_types": ["sliding_attention"] * 32},
]


def _of_transformers(model_type: str, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    rest = json.loads(json.dumps({k: v for k, v in fields.items() if k != "model_type"}))
    return AutoConfig.for_model(model_type, **rest)


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_config_says_what_transformers_says(name: str) -> None:
    model_type, fields = USUAL[name]
    ours, theirs = usual_config(model_type, fields), _of_transformers(model_type, fields)
    assert ours is not None
    for field, value in vars(ours).items():
        expected = getattr(theirs, field, False if type(value) is bool else None)
        if field == "head_dim":
            expected = head_dim_of(theirs)
        if field == "dtype" and value is not None:
            expected = str(expected).removeprefix("torch.")
        if field == "rope_parameters":
            expected = {key: each for key, each in expected.items() if key != "type"}
        assert value == expected, field
    with torch.device("cpu"):
        tables = [RotaryTable(config, 64, torch.float32) for config in (ours, theirs)]
    assert torch.equal(tables[0].cos, tables[1].cos)


@pytest.mark.parametrize("changes", UNUSUAL, ids=str)
def test_what_is_unusual_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert usual_config("llama", EIGHT_B | changes) is None


def test_llama3_frequencies_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _of_transformers(*USUAL["old names"])
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    expected = torch.outer(torch.arange(300, dtype=torch.float32), frequencies).cos()
    torch.testing.assert_close(
        RotaryTable(config, 300, torch.float32).cos, expected, rtol=0, atol=5e-5
    )


def test_transformers_is_not_imported_for_a_usual_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B))
    config = EngineConfig(model=str(tmp_path), load_format="dummy")
    described = load_description(resolve_model(config), config)
    assert described.hf_config.head_dim == 128
    assert described.eos_token_ids == (128001,)
