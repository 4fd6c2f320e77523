"""The GPU's kernels of adapters compile for an H100, and multiply by its tensor cores."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("triton")

from pagewire_kernels.gpu import lora
from pagewire_kernels.lora import LoraRows, LoraShape
from tests.fakes.hopper_compiler import compile_launches

SHAPE = LoraShape(1024, (512, 128, 128))
# Bytes of an H100's shared memory that a program may take.
SHARED_BYTES = 232_448


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        (torch.bfloat16, 16),
        (torch.float16, 64),
        pytest.param(torch.bfloat16, 512, marks=pytest.mark.slow),
        pytest.param(torch.float32, 512, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compile(dtype: torch.dtype, rank: int) -> None:
    table = lora.TritonLora().table(SHAPE, 4, rank, dtype, torch.device("cpu"))
    hidden = torch.empty(32, SHAPE.inputs, dtype=dtype)
    output = torch.empty(32, SHAPE.outputs, dtype=dtype)
    rows = LoraRows(torch.zeros(32, dtype=torch.int32))
    kernels = compile_launches(lora, lambda: table.add(hidden, output, rows))
    assert len(kernels) == 2
    for kernel in kernels:
        if dtype is not torch.float32:
            assert "mma" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED_BYTES
