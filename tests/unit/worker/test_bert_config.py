"""BERT's usual configs are read as transformers reads them, without importing it; others are its
own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.models.bert_config import usual_bert_config

_USUAL: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch_dtype": "bfloat16", "hidden_act": "relu", "layer_norm_eps": 1e-5},
        {"dtype": "float32", "problem_type": "regression", "num_labels": 1},
        {
            "id2label": {"1": "yes", "0": "no", "2": "perhaps"},
            "position_embedding_type": "absolute",
        },
    ],
)
def test_a_usual_config_is_read_as_transformers_reads_it(changes: dict[str, Any]) -> None:
    from transformers import AutoConfig

    fields = _USUAL | changes
    ours = usual_bert_config(fields)
    assert ours is not None
    theirs = AutoConfig.for_model(**fields)
    for name, value in vars(ours).items():
        expected = getattr(theirs, name, "absolute")
        if name == "dtype" and expected is not None:
            expected = str(expected).removeprefix("torch.")
        assert value == expected, name


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"hidden_size": "wide"},
        {"vocab_size": 0},
        {"num_hidden_layers": True},
        {"type_vocab_size": 2.0},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"add_cross_attention": True},
        {"dtype": "float64"},
        {"hidden_act": None},
        {"layer_norm_eps": "small"},
        {"id2label": {}},
        {"id2label": {"0": "a", "2": "b"}},
        {"id2label": {"0": 1}},
        {"id2label": ["a"]},
        {"num_labels": 0},
        {"num_labels": "2"},
        {"problem_type": 1},
    ],
)
def test_what_is_unusual_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert usual_bert_config(_USUAL | changes) is None


def test_transformers_is_not_imported_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(_USUAL))
    config = EngineConfig(model=str(tmp_path), load_format="dummy")
    description = load_description(resolve_model(config), config)
    assert description.pooler is not None
    assert description.pooler.info.labels == ("LABEL_0", "LABEL_1")
