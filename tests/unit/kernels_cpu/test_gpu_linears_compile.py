"""The GPU's dense kernels compile for an H100, with wide loads, and wait before they write."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagewire_kernels.gpu import dense_gemv, dense_rows, dense_skinny
from pagewire_kernels.gpu.dense_cuts import choose_cut
from tests.fakes.hopper_compiler import compile_launches

DEPTH, ROWS, MANY_ROWS = 512, 256, 8192


def of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def cut(tokens: int, rows: int) -> Any:
    return choose_cut(tokens, rows, DEPTH)


def gemv() -> object:
    norm = {"norm_weight": of(DEPTH), "eps": 1e-5}
    hidden, weight, bias = of(1, DEPTH), of(ROWS, DEPTH), of(ROWS)
    return dense_gemv.gemv(hidden, weight, cut(1, ROWS), bias=bias, gated=True, **norm)


def gemv_with_residual() -> object:
    hidden, weight = of(1, DEPTH), of(ROWS, DEPTH)
    return dense_gemv.gemv(hidden, weight, cut(1, ROWS), residual=of(1, ROWS))


def sliced_skinny(tokens: int) -> object:
    hidden, weight = of(tokens, DEPTH), of(ROWS, DEPTH)
    return dense_skinny.skinny(hidden, weight, cut(tokens, ROWS), residual=of(tokens, ROWS))


def wide_skinny(tokens: int) -> object:
    hidden, weight, bias = of(tokens, DEPTH), of(MANY_ROWS, DEPTH), of(MANY_ROWS)
    return dense_skinny.skinny(hidden, weight, cut(tokens, MANY_ROWS), bias=bias, gated=True)


def norm_of_rows() -> object:
    return dense_rows.rms_norm(of(32, DEPTH), of(DEPTH), 1e-5)


def silu_of_rows() -> object:
    return dense_rows.silu_and_mul(of(32, 8 * DEPTH))


CALLS: list[tuple[Any, Callable[[], object]]] = [
    (dense_gemv, gemv),
    (dense_gemv, gemv_with_residual),
    (dense_skinny, partial(sliced_skinny, 8)),
    (dense_skinny, partial(sliced_skinny, 16)),
    (dense_skinny, partial(wide_skinny, 8)),
    (dense_skinny, partial(wide_skinny, 64)),
    (dense_rows, norm_of_rows),
    (dense_rows, silu_of_rows),
]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.parametrize(("module", "call"), CALLS)
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
