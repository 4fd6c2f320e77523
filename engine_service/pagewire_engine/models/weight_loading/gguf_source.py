"""Reads a GGUF file tensor by tensor, dequantising a few rows at a time into the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagewire_engine.gguf_metadata import GGUFTensor, read_gguf_head
from pagewire_engine.models.errors import ModelFileError
from pagewire_engine.models.gguf_config import ROPE_DIVISORS, hf_tensor_name, permutes_heads

# Dequantising makes several fp32 copies of what it is given.
_CHUNK_ELEMENTS = 1 << 20


class GGUFSource:
    """The tensors of one GGUF file of the llama, qwen2 or qwen3 architecture."""

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
        self._file = path.open("rb", buffering=0)
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
            place.copy_(self._unpermuted(name, tensor))
            return
        for start, values in self._rows(tensor):
            place[start : start + len(values)].copy_(values)

    def rope_divisors(self) -> list[float] | None:
        """Llama 3's rope scaling as this format has it, one divisor a frequency."""
        if self._divisors is None:
            return None
        return torch.cat([values for _, values in self._rows(self._divisors)]).tolist()

    def close(self) -> None:
        self._file.close()

    def _rows(self, tensor: GGUFTensor) -> Iterable[tuple[int, torch.Tensor]]:
        """fp32 values of a few rows at a time (elements, of a vector), with the first's index."""
        kind = self._kind(tensor)
        row_elements = math.prod(tensor.shape[1:])
        rows = (
            tensor.shape[0] if len(tensor.shape) == 1 else max(1, _CHUNK_ELEMENTS // row_elements)
        )
        row_bytes = self._num_bytes(tensor) // tensor.shape[0]
        self._file.seek(tensor.offset)
        for start in range(0, tensor.shape[0], rows):
            count = min(rows, tensor.shape[0] - start)
            raw = np.fromfile(self._file, dtype=np.uint8, count=count * row_bytes)
            if len(raw) != count * row_bytes:
                raise ModelFileError(f"{self._path} is cut short; download it again", field="model")
            if len(tensor.shape) > 1:
                raw = raw.reshape(count, row_bytes)
            values = np.array(dequantize(raw, kind), dtype=np.float32, copy=None)
            yield start, torch.from_numpy(values).view(count, *tensor.shape[1:])

    def _unpermuted(self, name: str, tensor: GGUFTensor) -> torch.Tensor:
        """Rows in Hugging Face's order: within a head, both halves one after the other."""
        whole = torch.cat([values for _, values in self._rows(tensor)])
        heads = self._head_counts["q_proj" if ".q_proj." in name else "k_proj"]
        interleaved = whole.view(heads, whole.shape[0] // heads // 2, 2, *whole.shape[1:])
        return interleaved.transpose(1, 2).reshape(whole.shape)

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


def _head_counts(metadata: dict[str, object]) -> dict[str, int]:
    prefix = f"{metadata['general.architecture']}.attention."
    heads = metadata[prefix + "head_count"]
    kv_heads = metadata.get(prefix + "head_count_kv", heads)
    return {"q_proj": int(str(heads)), "k_proj": int(str(kv_heads))}
