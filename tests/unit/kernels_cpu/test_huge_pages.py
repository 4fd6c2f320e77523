"""Memory that weights share."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from pagewire_kernels import huge_pages
from pagewire_kernels.huge_pages import HugePages


def test_tensors_are_aligned_and_share_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK_BYTES", 1000)
    memory = HugePages()
    shapes = [((3, 5), torch.float32), ((7,), torch.int8), ((0, 4), torch.bfloat16)]
    shapes += [((400,), torch.float16), ((2000,), torch.int8), ((1,), torch.float64)]
    tensors = [memory.empty(*shape) for shape in shapes]
    for i, tensor in enumerate(tensors):
        assert (tuple(tensor.shape), tensor.dtype) == shapes[i]
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_a_chunk_lives_as_long_as_a_tensor_in_it() -> None:
    memory = HugePages()
    kept, dropped = memory.empty((10,), torch.int8), memory.empty((10,), torch.int8)
    chunk = weakref.ref(memory._chunk)
    del memory, dropped
    kept.fill_(7)
    del kept
    gc.collect()
    assert chunk() is None


def test_without_huge_pages_memory_is_of_the_common_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert HugePages().empty((4, 4), torch.float32).zero_().sum() == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not Linux")
def test_the_kernel_is_asked_for_huge_pages() -> None:
    tensor = HugePages().empty((1 << 20,), torch.int8)
    address, flags = tensor.data_ptr(), []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif first == "VmFlags:" and inside:
            flags = rest.split()
    assert "hg" in flags


@pytest.mark.parametrize("shape", [(3, 5), (2, 1024, 1024), (0, 7)])
def test_a_tensor_of_its_own(shape: tuple[int, ...]) -> None:
    tensor = huge_pages.empty(shape, torch.bfloat16)
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    tensor.fill_(3)
    assert bool((tensor == 3).all())


def test_no_memory_is_an_error_that_says_how_much() -> None:
    with pytest.raises(MemoryError, match="MiB of host memory"):
        huge_pages.empty((1 << 62,), torch.int8)
