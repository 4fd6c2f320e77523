"""Other weights, or others computed with, have another fingerprint; a copy has the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire_engine.model_files import ModelFiles
from pagewire_engine.weights_fingerprint import weights_fingerprint

SIZE = 3 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (SIZE // 256))
    return folder


def fingerprint(folder: Path, dtype: str = "float32", **settings: Any) -> str:
    config = EngineConfig(model=str(folder), **settings)
    return weights_fingerprint(ModelFiles(folder, None, "m"), config, dtype)


def test_a_copy_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(model)
    assert len(fingerprint(model)) == 64


def test_weights_that_were_trained_on_are_others(model: Path) -> None:
    before = fingerprint(model)
    data = bytearray((model / "model.safetensors").read_bytes())
    for index in range(100_000, SIZE):
        data[index] ^= 1
    (model / "model.safetensors").write_bytes(data)
    assert fingerprint(model) != before


def test_what_changes_the_numbers_counts_too(model: Path) -> None:
    one = fingerprint(model)
    others = [
        fingerprint(model, "bfloat16"),
        fingerprint(model, quantization="int8"),
        fingerprint(model, kv_cache_dtype="bfloat16"),
        fingerprint(model, load_format="dummy"),
        fingerprint(model, load_format="dummy", seed=1),
    ]
    (model / "config.json").write_text('{"rope_theta": 1}')
    assert len({one, *others, fingerprint(model)}) == 7
    # Not where it is served, nor how much of it.
    assert fingerprint(model, port=1, max_num_seqs=3) == fingerprint(model)
