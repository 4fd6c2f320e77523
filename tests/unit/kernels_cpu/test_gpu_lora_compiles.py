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


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile() -> None:
    dtype = torch.bfloat16
    table = lora.TritonLora().table(SHAPE, 4, 16, dtype, torch.device("cpu"))
    hidden = torch.empty(32, SHAPE.inputs, dtype=dtype)
    output = torch.empty(32, SHAPE.outputs, dtype=dtype)
    rows = LoraRows(torch.zeros(32, dtype=torch.int32))
    kernels = compile_launches(lora, lambda: table.add(hidden, output, rows))
    assert len(kernels) == 2
    for kernel in kernels:
        assert "mma" in kernel.asm["ptx"]
