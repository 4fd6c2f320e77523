"""Adapters that can't be served are refused, and each error says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.errors import PagewireError
from pagewire_engine.adapters.compatible_tokenizer import check_tokenizer
from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.adapters.errors import AdapterFileError, UnsupportedAdapterError
from pagewire_engine.adapters.files import resolve_folder, tokenizer_files
from pagewire_engine.adapters.loadable import LoadablePaths
from pagewire_engine.adapters.peft_config import PeftConfig
from pagewire_engine.worker.adapter_loading import AdapterTargets, load_weights
from tests.fakes.step_driver import CPU, load
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import tiny_reference

MODEL = "llama-llama3-rope-tied"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.fixture(scope="module")
def targets(tiny_llama: Path) -> AdapterTargets:
    return AdapterTargets(load(tiny_llama)[0], CPU)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "sound"
    write_tiny_adapter(folder, tiny_reference(MODEL), target_modules=["q_proj", "down_proj"])
    return folder


@pytest.fixture
def adapter(sound: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "adapter"))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def read(folder: Path, targets: AdapterTargets, max_rank: int = 64) -> Any:
    return load_weights(AdapterFolder(str(folder)), targets, max_rank, "LlamaForCausalLM")


def test_a_sound_adapter_is_described(sound: Path, targets: AdapterTargets) -> None:
    described = read(sound, targets).description
    assert (described.rank, described.alpha, described.modules) == (4, 6, ["down_proj", "q_proj"])
    again = read(sound, targets).description
    assert described.weights_version == again.weights_version


def test_a_single_changed_number_is_another_version(
    sound: Path, adapter: Path, targets: AdapterTargets
) -> None:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"{QUERY}A.weight"][0, 0] += 1e-3
        return tensors

    change_weights(adapter, changed)
    before = read(sound, targets).description.weights_version
    assert read(adapter, targets).description.weights_version != before
    change_config(adapter, lora_alpha=7)
    assert read(adapter, targets).description.alpha == 7


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "trained in full"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"trainable_token_indices": [1]}, "trained in full"),
        ({"r": 0}, "r must be"),
        ({"r": "8"}, "r must be"),
        ({"r": True}, "r must be"),
        ({"lora_alpha": None}, "lora_alpha must be"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be"),
        ({"r": 5}, "says 5"),
        ({"rank_pattern": {"q_proj": 2}}, "says 2"),
        ({"rank_pattern": {"(a+)+": 2}}, "too wild"),
        ({"rank_pattern": {"(": 2}}, "no pattern"),
        ({"rank_pattern": [1]}, "must be an object"),
        ({"alpha_pattern": {"q_proj": "x"}}, "must be a number"),
    ],
)
def test_configs_that_can_t_be_served_are_refused(
    adapter: Path, targets: AdapterTargets, fields: dict[str, Any], says: str
) -> None:
    change_config(adapter, **fields)
    with pytest.raises(PagewireError, match=says) as caught:
        read(adapter, targets)
    assert caught.value.field == "path"


def _nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors[f"{QUERY}B.weight"][1, 1] = torch.nan
    return tensors


def _renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): each for name, each in tensors.items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_nan, "NaN"),
        (_renamed("layers.0.", "layers.7."), "has no model.layers.7"),
        (_renamed("model.layers", "transformer.h"), "matches no module"),
        (lambda tensors: {k: v for k, v in tensors.items() if "lora_A" in k}, "only one"),
        (lambda tensors: {k: v.int() for k, v in tensors.items()}, "no floating-point"),
        (lambda tensors: {k: v[:, :-1].clone() for k, v in tensors.items()}, "do not go together"),
        (
            lambda tensors: {
                k: (v[:, :-8] if "lora_A" in k else v).contiguous() for k, v in tensors.items()
            },
            "another model",
        ),
        (lambda tensors: tensors | {"x.lora_magnitude_vector": torch.ones(2)}, "DoRA"),
        (lambda tensors: tensors | {"base_model.model.score.weight": torch.ones(2)}, "no part"),
        (lambda tensors: {}, "matches no module"),
    ],
)
def test_weights_that_can_t_be_served_are_refused(
    adapter: Path,
    targets: AdapterTargets,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    says: str,
) -> None:
    change_weights(adapter, change)
    with pytest.raises(PagewireError, match=says):
        read(adapter, targets)


def test_a_rank_above_the_limit_names_the_flag(sound: Path, targets: AdapterTargets) -> None:
    with pytest.raises(AdapterFileError, match="--max-lora-rank 4"):
        read(sound, targets, max_rank=3)


def test_pickles_are_refused_and_not_opened(adapter: Path, targets: AdapterTargets) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.bin")  # to open it would hang
    with pytest.raises(UnsupportedAdapterError, match="pickle"):
        read(adapter, targets)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickled", b"\xff" * 100, b"\0" * 8])
def test_random_bytes_are_no_weights(
    adapter: Path, targets: AdapterTargets, content: bytes
) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterFileError, match=r"corrupt|no module"):
        read(adapter, targets)


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(
    adapter: Path, targets: AdapterTargets, content: str
) -> None:
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(AdapterFileError, match="not"):
        read(adapter, targets)


def test_an_embedding_that_was_trained_in_full_is_refused(
    tmp_path: Path, targets: AdapterTargets
) -> None:
    reference = tiny_reference(MODEL)
    write_tiny_adapter(tmp_path, reference, target_modules=["embed_tokens"])
    read(tmp_path, targets)  # PEFT has put the model's own embedding beside it

    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if "base_layer" in name)
        tensors[name][3] += 0.5
        return tensors

    change_weights(tmp_path, changed)
    with pytest.raises(UnsupportedAdapterError, match="differs from the model's"):
        read(tmp_path, targets)


@pytest.mark.parametrize("path", ["..", "../outside", "/etc", "link", "a/../../outside", "", "\0"])
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    for folder in (root / "a", tmp_path / "outside"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(PagewireError) as caught:
        resolve_folder(path, str(root))
    assert caught.value.field == "path"
    assert "outside" not in caught.value.message.replace(path, "") or not path


def test_no_file_leads_out_of_the_folder(
    tmp_path: Path, sound: Path, targets: AdapterTargets
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"peft_type": "password"}')
    folder = tmp_path / "root" / "a"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").symlink_to(secret)
    (folder / "tokenizer.json").symlink_to(secret)
    confined = resolve_folder("a", str(tmp_path / "root"))
    with pytest.raises(AdapterFileError, match="leads out") as caught:
        load_weights(confined, targets, 64, "x")
    assert "password" not in caught.value.message
    with pytest.raises(AdapterFileError, match="leads out"):
        tokenizer_files(confined)
    # Links within the folder are what a hub's cache is made of.
    shutil.copytree(sound, tmp_path / "root" / "blobs")
    linked = tmp_path / "root" / "linked"
    linked.mkdir()
    for file in (tmp_path / "root" / "blobs").iterdir():
        (linked / file.name).symlink_to(file)
    load_weights(resolve_folder("linked", str(tmp_path / "root")), targets, 64, "x")
    assert LoadablePaths(str(tmp_path / "root")).paths() == ["a", "blobs", "linked"]


def test_without_a_folder_none_can_be_loaded() -> None:
    with pytest.raises(PagewireError, match="--lora-dir"):
        resolve_folder("a", None)
    assert LoadablePaths(None).paths() == []


def _tokenizer(vocab: dict[str, int], **added: int) -> dict[str, bytes]:
    content = {
        "model": {"vocab": vocab},
        "added_tokens": [{"content": name, "id": number} for name, number in added.items()],
    }
    return {"tokenizer.json": json.dumps(content).encode()}


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (_tokenizer({"a": 1, "b": 0}), "gives 'a' the id 1"),
        (_tokenizer({"a": 0, "b": 1}, extra=10), "add tokens"),
        (_tokenizer({"a": 0, "c": 1}), "calls 1 'c'"),
        ({"tokenizer.json": b"{}"}, "can't be read"),
    ],
)
def test_tokenizers_that_mean_something_else_are_refused(
    theirs: dict[str, bytes], says: str
) -> None:
    with pytest.raises(PagewireError, match=says):
        check_tokenizer(theirs, _tokenizer({"a": 0, "b": 1}), vocab_size=10)


def test_tokens_in_the_model_s_padding_are_fine() -> None:
    ours = _tokenizer({"a": 0, "b": 1})
    for theirs in (ours, {}, _tokenizer({"a": 0, "b": 1}, extra=5)):
        check_tokenizer(theirs, ours, vocab_size=10)


def test_scales_follow_the_patterns() -> None:
    config = PeftConfig.parse(
        {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 16},
            "alpha_pattern": {"up_proj": 32},
        }
    )
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 2
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 4
    assert config.scale_of("model.layers.1.mlp.up_proj") == 2
    assert config.scale_of("model.layers.0.mlp.up_proj") == 8
