"""Reads a GGUF file tensor by tensor, dequantising a few rows at a time into the parameters."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagewire_engine.gguf_metadata import GGUFTensor, read_gguf_head
from pagewire_engine.models.errors import ModelFileError
from pagewire_engine.models.gguf_config import ROPE_DIVISORS, hf_tensor_name, permutes_heads

# Dequantising makes several fp32 copies of what it is given: 64k elements at a time stay in cache.
_CHUNK_ELEMENTS = 1 << 16

Values = npt.NDArray[np.float32]


class GGUFSource:
    """The tensors of one GGUF file of the llama, qwen2 or qwen3 architecture."""

    reads_in_parallel = True

    def __init__(self, path: Path) -> None:
        """Reads the head.

        Raises:
            InvalidArgumentError: it is not GGUF.
            ModelFileError: a tensor lies beyond the end, or is of an unknown kind.
        """
        self._path = path
        head = read_gguf_head(path)
        self._metadata = head.metadata
        self._head_counts = _head_counts(head.metadata)
        self._tensors = {hf_tensor_name(tensor.name): tensor for tensor in head.tensors}
        self._divisors = self._tensors.pop(ROPE_DIVISORS, None)
        self._file = os.open(path, os.O_RDONLY)
        size = path.stat().st_size
        for tensor in head.tensors:
            if tensor.offset + self._num_bytes(tensor) > size:
                raise ModelFileError(
                    f"{path} is corrupt: it is cut short, {tensor.name} ends beyond it; download "
                    "it again",
                    field="model",
                )

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def where(self, name: str) -> str:
        return str(self._path)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        tensor = self._tensors[name]
        if permutes_heads(self._metadata, name):
            _store(self._unpermuted(name, tensor), place)
            return
        rows = place.view(1, -1) if place.dim() == 1 else place
        for start, values in self._rows(tensor):
            _store(values, rows[start : start + len(values)])

    def rope_divisors(self) -> list[float] | None:
        """Llama 3's rope scaling as this format has it, one divisor a frequency."""
        if self._divisors is None:
            return None
        return [float(value) for value in self._whole(self._divisors)]

    def close(self) -> None:
        os.close(self._file)

    def _rows(self, tensor: GGUFTensor) -> Iterable[tuple[int, Values]]:
        """fp32 values of a few rows at a time, with the first's index. A vector is one row."""
        kind = self._kind(tensor)
        num_rows, *row_shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        rows = max(1, _CHUNK_ELEMENTS // math.prod(row_shape))
        row_bytes = self._num_bytes(tensor) // num_rows
        for start in range(0, num_rows, rows):
            count = min(rows, num_rows - start)
            raw = np.empty(count * row_bytes, dtype=np.uint8)
            if os.preadv(self._file, [raw.data], tensor.offset + start * row_bytes) != len(raw):
                raise ModelFileError(f"{self._path} is cut short; download it again", field="model")
            # As one long row, since gguf works on 16 rows at a time, which is slow for short ones.
            values = np.asarray(dequantize(raw[None], kind), dtype=np.float32)
            yield start, values.reshape(count, *row_shape)

    def _whole(self, tensor: GGUFTensor) -> Values:
        return np.concatenate([values for _, values in self._rows(tensor)]).reshape(tensor.shape)

    def _unpermuted(self, name: str, tensor: GGUFTensor) -> Values:
        """Rows in Hugging Face's order: within a head, both halves one after the other."""
        whole = self._whole(tensor)
        heads = self._head_counts["q_proj" if ".q_proj." in name else "k_proj"]
        interleaved = whole.reshape(heads, whole.shape[0] // heads // 2, 2, *whole.shape[1:])
        return np.ascontiguousarray(interleaved.swapaxes(1, 2)).reshape(whole.shape)

    def _num_bytes(self, tensor: GGUFTensor) -> int:
        block_elements, block_bytes = GGML_QUANT_SIZES[self._kind(tensor)]
        return math.prod(tensor.shape) // block_elements * block_bytes

    def _kind(self, tensor: GGUFTensor) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(tensor.kind)
        except ValueError as error:
            raise ModelFileError(
                f"{self._path}: {tensor.name} has quantisation {tensor.kind}, which this version "
                "of the gguf package does not know; upgrade it, or use another quantisation",
                field="model",
            ) from error


def _store(values: Values, place: torch.Tensor) -> None:
    # numpy copies on this thread; torch would share work this small with threads that may be busy.
    if place.dtype == torch.float32 and place.device.type == "cpu":
        np.copyto(place.numpy(), values)
    else:
        place.copy_(torch.from_numpy(values))


def _head_counts(metadata: dict[str, object]) -> dict[str, int]:
    prefix = f"{metadata['general.architecture']}.attention."
    heads = metadata[prefix + "head_count"]
    kv_heads = metadata.get(prefix + "head_count_kv", heads)
    return {"q_proj": int(str(heads)), "k_proj": int(str(kv_heads))}
