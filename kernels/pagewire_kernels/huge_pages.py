"""Memory for weights and caches in pages of 2 MiB, where Linux gives them.

A decode reads every weight and its context's keys and values once. With pages of 4 KiB the
processor looks up a page for each 64 lines, in a virtual machine through two tables, and reads a
quarter slower.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

# Weights are smaller than a page: many share one mapping. What is not touched takes no memory.
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
_PAGE_BYTES = 2 << 20


class HugePages:
    """Gives out uninitialised tensors; a chunk of memory lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape, contiguous, aligned to 64 bytes."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._chunk) - self._used:
            self._chunk = _chunk(max(size, _CHUNK_BYTES))
            self._used = 0
        begin = self._used
        self._used = begin + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[begin : begin + size].view(dtype).view(*shape)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory of its own, uninitialised. What is not touched takes none.

    Raises:
        MemoryError: there is none.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _PAGE_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return _chunk(size).view(dtype).view(*shape)


def _chunk(size: int) -> torch.Tensor:
    try:
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(size, dtype=torch.uint8)
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's
        raise MemoryError(f"{size / 2**20:.0f} MiB of host memory: {error}") from None
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
