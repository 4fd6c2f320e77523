"""The GPU's dense kernels compile for an H100, with wide loads, and wait before they write."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagewire_kernels.gpu import dense_gemv, dense_rows, dense_skinny
from pagewire_kernels.gpu.dense_skinny import SkinnyConfig
from tests.fakes.hopper_compiler import compile_launches

DEPTH, ROWS = 512, 256


def of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def gemv() -> object:
    norm = {"norm_weight": of(DEPTH), "eps": 1e-5}
    return dense_gemv.gemv(of(1, DEPTH), of(ROWS, DEPTH), bias=of(ROWS), gated=True, **norm)


def gemv_with_residual() -> object:
    return dense_gemv.gemv(of(1, DEPTH), of(ROWS, DEPTH), residual=of(1, ROWS))


def skinny() -> object:
    config = SkinnyConfig(64, 64, 4, 3, prefetch=8)
    norm = {"norm_weight": of(DEPTH), "eps": 1e-5}
    return dense_skinny.skinny(
        of(8, DEPTH), of(ROWS, DEPTH), bias=of(ROWS), gated=True, config=config, **norm
    )


def sliced_skinny() -> object:
    config = SkinnyConfig(16, 64, 4, 3, slices=4)
    return dense_skinny.skinny(of(8, DEPTH), of(ROWS, DEPTH), residual=of(8, ROWS), config=config)


def split_skinny() -> object:
    config = SkinnyConfig(32, 64, 4, 3, splits=2)
    arrivals = torch.empty(ROWS, dtype=torch.int32)
    return dense_skinny.skinny(
        of(8, DEPTH), of(ROWS, DEPTH), residual=of(8, ROWS), arrivals=arrivals, config=config
    )


def norm_of_rows() -> object:
    return dense_rows.rms_norm(of(32, DEPTH), of(DEPTH), 1e-5)


def silu_of_rows() -> object:
    return dense_rows.silu_and_mul(of(32, 8 * DEPTH))


CALLS: list[tuple[Any, Callable[[], object]]] = [
    (dense_gemv, gemv),
    (dense_gemv, gemv_with_residual),
    (dense_skinny, skinny),
    (dense_skinny, sliced_skinny),
    (dense_skinny, split_skinny),
    (dense_rows, norm_of_rows),
    (dense_rows, silu_of_rows),
]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.parametrize(("module", "call"), CALLS, ids=lambda value: value.__name__)
def test_a_kernel_compiles_and_waits_before_it_writes(
    module: Any, call: Callable[[], object]
) -> None:
    (kernel,) = compile_launches(module, call)
    code = kernel.asm["ptx"]
    before, wait, after = code.partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.launch_dependents" in before
    writes = r"\b(st\.global|red\.|atom\.)"
    assert not re.search(writes, before)
    assert re.search(writes, after)
    # 16 bytes a load: vectors of four words, or asynchronous copies to shared memory.
    assert "ld.global.v4.b32" in code or re.search(r"cp\.async\.cg\.shared\.global .*0x10", code)


def test_a_gemv_has_weights_on_their_way_before_it_waits() -> None:
    (kernel,) = compile_launches(dense_gemv, gemv)
    before, _, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert "ld.global.v4.b32" in before
    assert "ld.global.v4.b32" in after  # the row itself
