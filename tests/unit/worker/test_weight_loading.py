"""Each parameter is filled once, from sound files only."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.config import EngineConfig
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.errors import ModelFileError
from pagewire_engine.models.weight_loading import (
    load_model,
    loader,
    safetensors_source,
    staging,
)
from tests.fakes.step_driver import CPU, load
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import tiny_reference, write_tiny_model

FILE = "model.safetensors"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "spoiled"
    shutil.copytree(tiny_llama, copy)
    return copy


def _change(folder: Path, change: Any) -> None:
    weights = load_file(folder / FILE)
    change(weights)
    save_file(weights, folder / FILE)


def _dummy(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = EngineConfig(model=str(folder), load_format="dummy")
    files = resolve_model(config)
    return load_model(
        files, load_description(files, config), dtype=dtype, device=CPU, dummy_seed=seed
    )


def _same(one: CausalLM, other: CausalLM) -> bool:
    places = other.checkpoint_tensors()
    return all(torch.equal(place, places[name]) for name, place in one.checkpoint_tensors().items())


def test_shards_named_by_an_index_are_one_checkpoint(folder: Path) -> None:
    whole = load(folder)[0]
    weights = load_file(folder / FILE)
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / shard)
    index = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / FILE).unlink()
    assert _same(load(folder)[0], whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"lacks b\.safetensors.*download"):
        load(folder)


def _sharded(folder: Path) -> None:
    """The same weights in three files, some of them in other dtypes."""
    weights = load_file(folder / FILE)
    names = sorted(weights)
    for number in range(3):
        part = {name: weights[name] for name in names[number::3]}
        if number:
            part = {name: value.to(torch.bfloat16) for name, value in part.items()}
        save_file(part, folder / f"{number}.safetensors")
    (folder / FILE).unlink()


@pytest.mark.parametrize("buffer_bytes", [8, 100, 1 << 20])
def test_several_readers_load_what_one_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    """As for a GPU, whose files are read by several threads through small buffers."""
    _sharded(folder)
    one = load(folder, dtype=torch.bfloat16)[0]
    monkeypatch.setitem(loader._READERS, "cpu", 4)
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(safetensors_source, "BUFFER_BYTES", buffer_bytes)
    assert _same(load(folder, dtype=torch.bfloat16)[0], one)


def test_several_readers_of_a_gguf_load_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, tiny_reference("qwen2-unused-window-tied"))
    one = load(file)[0]
    monkeypatch.setitem(loader._READERS, "cpu", 4)
    assert _same(load(file)[0], one)


def test_a_file_that_shrinks_while_several_read_it_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loader._READERS, "cpu", 4)
    read_all = loader._read_all

    def shrink(*arguments: Any) -> Any:
        os.truncate(folder / FILE, 4000)
        return read_all(*arguments)

    monkeypatch.setattr(loader, "_read_all", shrink)
    with pytest.raises(ModelFileError, match="cut short"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_converted(folder: Path, dtype: torch.dtype) -> None:
    expected = {name: value.to(dtype).float() for name, value in load_file(folder / FILE).items()}
    _change(folder, lambda weights: weights.update({n: w.to(dtype) for n, w in weights.items()}))
    for name, place in load(folder)[0].checkpoint_tensors().items():
        assert torch.equal(place, expected[name]), name


def test_a_checkpoint_of_the_bare_decoder_is_taken(folder: Path) -> None:
    whole = load(folder)[0]

    def strip(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    _change(folder, strip)
    assert _same(load(folder)[0], whole)


def test_known_leftovers_of_old_checkpoints_are_ignored(folder: Path, tmp_path: Path) -> None:
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _change(folder, lambda weights: weights.update(leftover))
    load(folder)
    gpt2 = tmp_path / "gpt2"
    write_tiny_model(gpt2, "gpt2-tied")
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    masks["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    _change(gpt2, lambda weights: weights.update(masks))
    load(gpt2)


def test_a_tied_head_that_is_also_stored_is_fine_if_it_is_the_embedding(folder: Path) -> None:
    def store(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    _change(folder, store)
    model = load(folder)[0]
    assert model.lm_head.tied


def test_a_stored_head_that_differs_from_the_embedding_is_used(folder: Path) -> None:
    head = torch.randn(320, 48)
    _change(folder, lambda weights: weights.update({"lm_head.weight": head}))
    model = load(folder)[0]
    assert not model.lm_head.tied
    hidden = torch.randn(2, 48)
    torch.testing.assert_close(model.compute_logits(hidden), hidden @ head.T)


def _missing(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.self_attn.k_proj.weight"]


def _extra(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)


def _twice(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = torch.zeros(48)


def _shape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(47)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_missing, r"lacks 1 \(model\.layers\.1\.self_attn\.k_proj\.weight\)"),
        (_extra, r"unexpected 1 \(model\.layers\.0\.self_attn\.q_proj\.bias\)"),
        (_twice, r"holds both .*norm\.weight"),
        (_shape, r"model\.norm\.weight has shape \[47\].*\[48\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    folder: Path, change: Any, message: str
) -> None:
    _change(folder, change)
    with pytest.raises(ModelFileError, match=message):
        load(folder)


def _header(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _wrong_offsets(data: bytes) -> bytes:
    header, body = _header(data)
    header["model.norm.weight"]["data_offsets"][1] += 4
    return _with_header(header, body)


def _unknown_dtype(data: bytes) -> bytes:
    header, body = _header(data)
    header["model.norm.weight"]["dtype"] = "F4"
    return _with_header(header, body)


def _no_shape(data: bytes) -> bytes:
    header, body = _header(data)
    del header["model.norm.weight"]["shape"]
    return _with_header(header, body)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "corrupt.*empty"),
        (lambda data: data[:5], "corrupt"),
        (lambda data: b"\xff" * 200, "corrupt.*header is longer"),
        (lambda data: data[:8] + b"not json" + data[16:], "corrupt.*not JSON"),
        (lambda data: _with_header([1], b""), "corrupt.*not a JSON object"),
        (lambda data: data[:-10], "corrupt.*cut short"),
        (_wrong_offsets, r"corrupt.*model\.norm\.weight does not fit"),
        (_no_shape, r"corrupt.*model\.norm\.weight makes no sense"),
        (_unknown_dtype, "dtype F4.*not supported"),
    ],
)
def test_corrupt_safetensors_are_refused_by_name(folder: Path, spoil: Any, message: str) -> None:
    path = folder / FILE
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ModelFileError, match=message):
        load(folder)


def test_a_gguf_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, tiny_reference("qwen2-unused-window-tied"))
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="cut short"):
        load(file)


def test_dummy_weights_depend_on_the_seed_alone(folder: Path) -> None:
    assert _same(_dummy(folder, 3), _dummy(folder, 3))
    assert not _same(_dummy(folder, 3), _dummy(folder, 4))
    for parameter in _dummy(folder, 3, torch.bfloat16).parameters():
        assert parameter.dtype is torch.bfloat16
        assert parameter.isfinite().all()
        assert parameter.any()
