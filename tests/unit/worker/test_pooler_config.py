"""Whether a model pools, and how: what its files and the settings say, and what they can't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.pooling import Task
from pagewire_engine.model_files import ModelDescription, load_description, resolve_model
from pagewire_engine.models.errors import ModelFileError, UnsupportedModelError
from pagewire_engine.pooler_config import PoolerConfig
from pagewire_engine.worker.encoder_worker import EncoderWorker, longest_prompt
from tests.fakes.tiny_models import write_sentence_transformers_files, write_tiny_bert

_BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 48}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48}
_CLASSES = _BERT | {"architectures": ["BertForSequenceClassification"]}


def describe(folder: Path, fields: dict[str, Any], **settings: Any) -> ModelDescription:
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(fields | {"num_attention_heads": 4}))
    config = EngineConfig(model=str(folder), load_format="dummy", **settings)
    return load_description(resolve_model(config), config)


def pooler(folder: Path, fields: dict[str, Any], **settings: Any) -> PoolerConfig:
    found = describe(folder, fields, **settings).pooler
    assert found is not None
    return found


def refused(folder: Path, fields: dict[str, Any], **settings: Any) -> PagewireError:
    with pytest.raises(PagewireError) as caught:
        describe(folder, fields, **settings)
    return caught.value


def test_what_pools_by_itself(tmp_path: Path) -> None:
    assert describe(tmp_path, _LLAMA).pooler is None
    plain = pooler(tmp_path, _BERT)
    assert (plain.pooling_type, plain.normalize, plain.is_encoder) == ("mean", True, True)
    assert plain.tasks == (Task.EMBED, Task.SCORE)
    causal = pooler(tmp_path, _LLAMA, runner="pooling")
    assert (causal.pooling_type, causal.normalize, causal.is_encoder) == ("last", True, False)
    assert pooler(tmp_path, _CLASSES).tasks == (Task.CLASSIFY,)


def test_sentence_transformers_files_are_heeded(tmp_path: Path) -> None:
    write_sentence_transformers_files(tmp_path, "lasttoken", normalize=False, max_seq_length=77)
    causal = pooler(tmp_path, _LLAMA)
    assert (causal.pooling_type, causal.normalize) == ("last", False)
    assert describe(tmp_path, _LLAMA).max_model_len == 77
    assert describe(tmp_path, _LLAMA, max_model_len=99).max_model_len == 99
    assert describe(tmp_path, _LLAMA, runner="generate").pooler is None
    changed = pooler(tmp_path, _BERT, pooling_type="cls", normalize_embeddings=True)
    assert (changed.pooling_type, changed.normalize) == ("cls", True)


def test_newer_files_name_the_mode_by_one_word(tmp_path: Path) -> None:
    write_sentence_transformers_files(tmp_path)
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text('{"pooling_mode": "cls"}')
    assert pooler(tmp_path, _BERT).pooling_type == "cls"
    path.write_text('{"pooling_mode": ["lasttoken"]}')
    assert pooler(tmp_path, _BERT).pooling_type == "last"
    for modes, named in (('"max"', "max"), ('["cls", "mean"]', "cls_token and mean_tokens")):
        path.write_text(f'{{"pooling_mode": {modes}}}')
        assert f"pooling by {named}" in refused(tmp_path, _BERT).message


@pytest.mark.parametrize("mode", ["max_tokens", "weightedmean_tokens"])
def test_other_poolings_are_refused_unless_overridden(tmp_path: Path, mode: str) -> None:
    write_sentence_transformers_files(tmp_path, mode)
    error = refused(tmp_path, _BERT)
    assert isinstance(error, UnsupportedModelError)
    assert mode in error.message
    assert "pooling_type" in error.message
    assert pooler(tmp_path, _BERT, pooling_type="mean").pooling_type == "mean"


def test_two_poolings_at_once_are_refused(tmp_path: Path) -> None:
    write_sentence_transformers_files(tmp_path)
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(both))
    assert "cls_token and mean_tokens" in refused(tmp_path, _BERT).message


@pytest.mark.parametrize(
    ("content", "kind", "named"),
    [
        ("{}", ModelFileError, "list"),
        ("[", ModelFileError, "can't be read"),
        ("[1]", ModelFileError, "list"),
        ('[{"type": "sentence_transformers.models.Dense"}]', UnsupportedModelError, "Dense"),
        ('[{"type": "x.Pooling", "path": "gone"}]', ModelFileError, "gone"),
    ],
)
def test_files_that_make_no_sense_are_refused(
    tmp_path: Path, content: str, kind: type[PagewireError], named: str
) -> None:
    (tmp_path / "modules.json").write_text(content)
    error = refused(tmp_path, _BERT)
    assert isinstance(error, kind)
    assert named in error.message


@pytest.mark.parametrize(
    ("fields", "settings", "field"),
    [
        (_BERT, {"runner": "generate"}, "runner"),
        (_LLAMA, {"pooling_type": "last"}, "pooling_type"),
        (_LLAMA, {"normalize_embeddings": False}, "normalize_embeddings"),
        (_LLAMA, {"runner": "pooling", "pooling_type": "cls"}, "pooling_type"),
        (_BERT, {"enable_lora": True}, "enable_lora"),
        (_CLASSES, {"pooling_type": "mean"}, "pooling_type"),
        (_CLASSES, {"normalize_embeddings": True}, "normalize_embeddings"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, fields: dict[str, Any], settings: dict[str, Any], field: str
) -> None:
    error = refused(tmp_path, fields, **settings)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field


def test_dimensions_are_those_that_the_config_declares(tmp_path: Path) -> None:
    assert pooler(tmp_path, _BERT | {"is_matryoshka": True}).info.any_dimensions
    listed = {"matryoshka_dimensions": [32, 8, 48, 999]}
    for fields in (_BERT, _LLAMA):
        info = pooler(tmp_path, fields | listed, runner="pooling").info
        assert (info.size, info.dimensions) == (48, (8, 32))


@pytest.mark.parametrize(
    ("fields", "activation", "applied", "tasks"),
    [
        ({}, "softmax", True, (Task.CLASSIFY,)),
        ({"problem_type": "multi_label_classification"}, "sigmoid", True, (Task.CLASSIFY,)),
        ({"id2label": {"0": "a"}}, "sigmoid", True, (Task.CLASSIFY, Task.SCORE)),
        (
            {
                "id2label": {"0": "a"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            "sigmoid",
            False,
            (Task.CLASSIFY, Task.SCORE),
        ),
    ],
)
def test_a_heads_activation(
    tmp_path: Path,
    fields: dict[str, Any],
    activation: str,
    applied: bool,
    tasks: tuple[Task, ...],
) -> None:
    found = pooler(tmp_path, _CLASSES | fields)
    assert (found.activation, found.default_activation, found.tasks) == (activation, applied, tasks)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    fields = {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}
    assert "Tanh" in refused(tmp_path, _CLASSES | fields).message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "relative"),
        ({"is_decoder": True}, "decoder"),
        ({"hidden_act": "strange"}, "strange"),
    ],
)
def test_a_bert_of_another_kind_is_refused(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    describe(tmp_path, _BERT | fields)
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", num_threads=1)
    with pytest.raises(UnsupportedModelError, match=named):
        EncoderWorker(config, resolve_model(config))


def test_a_prompt_is_no_longer_than_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    description = describe(tmp_path, _BERT)
    assert longest_prompt(description, EngineConfig(model="m")) == 512
    assert longest_prompt(description, EngineConfig(model="m", max_num_batched_tokens=600)) == 512
    assert not caplog.records
    assert longest_prompt(description, EngineConfig(model="m", max_num_batched_tokens=100)) == 100
    assert "max_num_batched_tokens" in caplog.text
    asked = EngineConfig(model="m", max_num_batched_tokens=100, max_model_len=512)
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens"):
        longest_prompt(description, asked)


def test_a_checkpoint_with_its_prefix_and_other_heads_is_an_encoders_too(tmp_path: Path) -> None:
    """As models saved from a masked language model are."""
    from safetensors.torch import load_file, save_file

    write_tiny_bert(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    first = next(iter(tensors.values()))
    save_file(tensors | {"cls.predictions.bias": first.clone()}, path)
    config = EngineConfig(model=str(tmp_path), device="cpu", num_threads=1)
    EncoderWorker(config, resolve_model(config))
