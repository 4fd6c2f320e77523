"""What tells one model's weights from another's, without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pagewire.config import EngineConfig
from pagewire_engine.model_files import ModelFiles

_HEAD_BYTES = 1 << 16
_SAMPLES_A_FILE = 64
_SAMPLE_BYTES = 4096


def weights_fingerprint(files: ModelFiles, config: EngineConfig, dtype: str) -> str:
    """SHA-256 (hex) over sizes, heads and samples of the files of weights, and over what changes
    the numbers computed with them.

    A fine-tuned model differs from its base nearly everywhere, and so in the samples; to read all
    of a large model again would take longer than to load it.

    Args:
        files: the model's.
        config: the engine's settings.
        dtype: that the model is computed in.
    """
    digest = hashlib.sha256(f"{dtype}\0{config.quantization}\0{config.kv_cache_dtype}\0".encode())
    config_file = files.path / "config.json"
    if files.gguf is None and config_file.is_file():
        digest.update(config_file.read_bytes())
    if config.load_format == "dummy":
        digest.update(f"dummy\0{config.seed}".encode())
        return digest.hexdigest()
    for file in _weight_files(files):
        _add_samples(digest, file)
    return digest.hexdigest()


def _weight_files(files: ModelFiles) -> Iterator[Path]:
    if files.gguf is not None:
        yield files.gguf
    else:
        yield from sorted(files.path.glob("*.safetensors"))


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    # Not the name: a copy of a model is the same model.
    digest.update(f"\0{size}\0".encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_HEAD_BYTES))
        for number in range(_SAMPLES_A_FILE):
            opened.seek(size * number // _SAMPLES_A_FILE)
            digest.update(opened.read(_SAMPLE_BYTES))
