"""The GPU's attention kernels compile for an H100, and wait before they read or write."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagewire_kernels.attention import DeviceCounts
from pagewire_kernels.gpu import attention
from pagewire_kernels.gpu.attention import TritonAttention
from tests.fakes.attention_batch import make_batch
from tests.fakes.hopper_compiler import compile_launches

SHARED_MEMORY = 227 << 10  # of a multiprocessor, the most a program can have
LLAMA_8B: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def compiled(
    layout: dict[str, Any],
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    on_device: bool = False,
) -> dict[str, Any]:
    """The kernels of a layer's attention by their names."""
    batch = make_batch(decodes, chunks, **layout, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    angles = torch.zeros((1, batch.query.shape[2] // 2))
    positions = torch.zeros(len(batch.query), dtype=torch.int64)
    caches = (batch.key_cache, batch.value_cache)
    metadata = batch.metadata
    if on_device:
        metadata = dataclasses.replace(
            metadata, on_device=DeviceCounts(torch.zeros(1, dtype=torch.int32), 8)
        )
    backend = TritonAttention(dependent_launch=True)

    def layer() -> None:
        query = backend.rotate_and_write(
            batch.query, batch.key, batch.value, positions, angles, angles, *caches,
            batch.metadata.slot_mapping,
        )  # fmt: skip
        backend.paged_attention(query, *caches, metadata, 0.1, window)

    return {kernel.metadata.name: kernel for kernel in compile_launches(attention, layer)}


@pytest.mark.parametrize("on_device", [False, True])
def test_a_layer_of_decodes_and_chunks(on_device: bool) -> None:
    kernels = compiled(LLAMA_8B, [100], [(40, 20)], on_device=on_device)
    assert set(kernels) == {"write_rows", "decode_split", "decode_reduce", "chunk_attention"}
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in kernels.values())
    for name in ("write_rows", "decode_split", "decode_reduce"):
        ptx = kernels[name].asm["ptx"]
        touched = re.search(r"\b(ld\.global|st\.global|cp\.async)", ptx)
        assert touched is not None
        assert ptx.index("griddepcontrol.wait") < touched.start(), f"{name} does not wait"
    chunk = kernels["chunk_attention"].asm["ptx"]
    assert "wgmma.mma_async" in chunk, "not on tensor cores of this generation"
    assert "griddepcontrol" not in chunk
    for name in ("decode_split", "chunk_attention"):
        copies = re.findall(
            r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], (0x\w+)", kernels[name].asm["ptx"]
        )
        assert set(copies) == {"0x10"}, f"{name} reads keys in pieces of less than 16 bytes"


def test_fp8_keys_under_a_window_and_heads_that_fill_no_tile() -> None:
    layout = {"num_heads": 7, "num_kv_heads": 1, "head_dim": 96}
    fp8 = torch.float8_e4m3fn
    kernels = compiled(layout, [30], [(40, 20)], cache_dtype=fp8, window=64)
    assert set(kernels) == {"write_rows", "decode_split", "chunk_attention"}
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in kernels.values())
