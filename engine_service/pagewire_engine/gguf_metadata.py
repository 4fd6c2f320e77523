"""The head of a GGUF file: its keys and values, and where its tensors lie.

`gguf.GGUFReader` wraps every array element in numpy views and takes seconds for a vocabulary;
reading the head straight through takes a tenth of one.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.errors import InvalidArgumentError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        name: llama.cpp's, such as blk.0.attn_q.weight.
        shape: slowest dimension first, as torch and numpy have it.
        kind: ggml's number of the quantisation.
        offset: first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHead:
    """All keys (arrays are lists), and all tensors."""

    metadata: dict[str, Any]
    tensors: list[GGUFTensor]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys of the file's head; arrays become lists.

    Raises:
        InvalidArgumentError: the file is not GGUF of version 2 or 3, or is cut short.
    """
    return read_gguf_head(path).metadata


def read_gguf_head(path: Path) -> GGUFHead:
    """Keys and tensors.

    Raises:
        InvalidArgumentError: the file is not GGUF of version 2 or 3, or is cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Head(data).read()
    except (OSError, struct.error, ValueError, KeyError, IndexError) as error:
        raise InvalidArgumentError(
            "model", f"{path} is not a readable GGUF file ({error}); download it again"
        ) from error


class _Head:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GGUFHead:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_keys)}
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        tensors = [GGUFTensor(name, shape, kind, start + at) for name, shape, kind, at in infos]
        return GGUFHead(metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._at
        self._at += length
        if self._at > len(self._data):
            raise ValueError("it is cut short")
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(length)]
        code = f"<{length}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)
