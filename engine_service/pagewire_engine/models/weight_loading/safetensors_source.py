"""Reads safetensors files tensor by tensor, straight into the parameters.

The `safetensors` package maps whole files, whose pages then count as this process's memory beside
the parameters; plain reads do not. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagewire_engine.models.errors import ModelFileError
from pagewire_engine.models.weight_loading.staging import BUFFER_BYTES, Staging

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsSource:
    """One file, or the shards that an index names."""

    reads_in_parallel = True

    def __init__(self, folder: Path) -> None:
        """Reads and checks the headers.

        Args:
            folder: of the model, or one file.

        Raises:
            ModelFileError: a file is missing, cut short or inconsistent.
        """
        self._entries: dict[str, _Entry] = {}
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        for path in [folder] if folder.is_file() else _shards(folder):
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise _corrupt(path, f"{name} is also in {self._entries[name].path.name}")
                self._entries[name] = entry

    def names(self) -> Iterable[str]:
        return self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """What the file holds a tensor in."""
        return self._entries[name].dtype

    def where(self, name: str) -> str:
        return str(self._entries[name].path)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        entry = self._entries[name]
        if not place.is_contiguous():
            whole = torch.empty(entry.shape, dtype=entry.dtype)
            self._read(entry, 0, whole.view(-1))
            place.copy_(whole)
            return
        flat = place.view(-1)
        if place.dtype == entry.dtype and place.device.type == "cpu":
            self._read(entry, 0, flat)
            return
        staging = self._staging_of_thread(place.device)
        count = BUFFER_BYTES // entry.dtype.itemsize
        for start in range(0, len(flat), count):
            part = flat[start : start + count]
            buffer = staging.buffer(len(part), entry.dtype)
            self._read(entry, start * entry.dtype.itemsize, buffer)
            staging.copy(buffer, part)
        staging.finish()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._of_thread = threading.local()

    def _staging_of_thread(self, device: torch.device) -> Staging:
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = Staging(device)
        staging: Staging = self._of_thread.staging
        return staging

    def _read(self, entry: _Entry, offset: int, flat: torch.Tensor) -> None:
        """Fills a contiguous flat CPU tensor with the bytes at `offset` of the tensor."""
        view = flat.view(torch.uint8).numpy().data
        filled = 0
        while filled < len(view):
            start = entry.offset + offset + filled
            count = os.preadv(self._file(entry.path), [view[filled:]], start)
            if not count:
                raise _corrupt(entry.path, "it is cut short")
            filled += count

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _corrupt(index, f"it names no shards ({error})") from error
        paths = [folder / str(name) for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelFileError(
                f"{folder} lacks {', '.join(missing)}, which {index.name} names; download the "
                "model again",
                field="model",
            )
        return paths
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelFileError(f"{folder} has no safetensors files", field="model")
    return paths


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or length > min(_MAX_HEADER, file_size - 8):
                raise _corrupt(path, "its header is longer than the file, or the file is empty")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelFileError(f"{path} can't be read: {error}", field="model") from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _entry(path, name, info, start, file_size) for name, info in header.items()}


def _entry(path: Path, name: str, info: Any, start: int, file_size: int) -> _Entry:
    try:
        shape = tuple(int(size) for size in info["shape"])
        begin, end = (int(offset) for offset in info["data_offsets"])
        kind = info["dtype"]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"the entry of {name} makes no sense") from error
    if kind not in _DTYPES:
        raise ModelFileError(
            f"{path}: {name} has dtype {kind}, which is not supported; use a checkpoint in "
            "float32, bfloat16 or float16",
            field="model",
        )
    dtype = _DTYPES[kind]
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise _corrupt(path, f"the size of {name} does not fit its shape")
    if begin < 0 or start + end > file_size:
        raise _corrupt(path, f"it is cut short: {name} ends beyond it")
    return _Entry(path, dtype, shape, start + begin, end - begin)


def _corrupt(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is corrupt: {why}; download it again", field="model")
