"""The GPU's linears, norm and activation equal float64's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_kernels.gpu.dense_cuts import choose_cut
from pagewire_kernels.gpu.dense_gemv import GemvConfig, gemv
from pagewire_kernels.gpu.dense_rows import rms_norm, silu_and_mul
from pagewire_kernels.gpu.dense_skinny import SkinnyConfig, skinny

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DTYPES = sorted(TOLERANCE, key=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) / 2).to(dtype)


def expected_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = hidden.double()
    if norm_weight is not None:
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * norm_weight.double()
    product = wide @ weight.double().T
    if bias is not None:
        product += bias.double()
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * up
    return product if residual is None else residual.double() + product


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert error < TOLERANCE[actual.dtype]


def surroundings(case: str, tokens: int, rows: int, depth: int, dtype: torch.dtype) -> Any:
    """What is folded into a linear, by name."""
    options: dict[str, Any] = {}
    if "bias" in case:
        options["bias"] = draw(rows, dtype=dtype, seed=1)
    if "norm" in case:
        options |= {"norm_weight": draw(depth, dtype=dtype, seed=2), "eps": EPS}
    if "gated" in case:
        options["gated"] = True
    if "residual" in case:
        options["residual"] = draw(tokens, rows, dtype=dtype, seed=3)
    return options


CASES = ["plain", "bias", "gated", "gated bias", "bias residual"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, "norm", "norm gated bias"])
def test_gemv_equals_float64(case: str, dtype: torch.dtype) -> None:
    # 9 pairs and 18 outputs fill no last program of 4, 75 columns no last block of 32.
    hidden, weight = draw(1, 75, dtype=dtype), draw(18, 75, dtype=dtype, seed=4)
    options = surroundings(case, 1, 18, 75, dtype)
    expected = expected_linear(hidden, weight, **options)
    check(gemv(hidden, weight, GemvConfig(4, 32, 2), **options), expected)


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (2, 16), (3, 2500)])
def test_gemv_as_it_is_cut_for_its_depth(rows: int, depth: int) -> None:
    hidden = draw(1, depth, dtype=torch.float32)
    weight = draw(rows, depth, dtype=torch.float32, seed=4)
    cut = choose_cut(1, rows, depth)
    assert isinstance(cut, GemvConfig)
    check(gemv(hidden, weight, cut), expected_linear(hidden, weight))


@settings(max_examples=200)
@given(
    rows=st.integers(0, 300),
    outputs=st.sampled_from([1, 576, 2048, 4096, 4097, 6144, 8192, 28672, 128256]),
    depth=st.integers(1, 30000),
)
def test_a_cut_is_of_a_kernel_that_can_take_it(rows: int, outputs: int, depth: int) -> None:
    match choose_cut(rows, outputs, depth):
        case GemvConfig() as cut:
            assert rows == 1
            # The loop over the depth is unrolled.
            assert -(-depth // cut.block) <= 16
        case SkinnyConfig() as cut:
            assert 2 <= rows <= 64
            assert cut.slices in (1, cut.warps)
            # There are programs for all multiprocessors, if the matrix has the outputs for it.
            assert -(-outputs // cut.outputs) >= min(64, outputs // 16)
            # An H100's program may have 227 KiB of shared memory for what is in flight.
            tile = max(16, 1 << (rows - 1).bit_length())
            step = cut.block * cut.slices * (tile + cut.outputs) * 2
            assert step * cut.stages <= 227 * 1024
        case None:
            assert rows != 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slices", [1, 2])
def test_skinny_equals_float64(case: str, dtype: torch.dtype, slices: int) -> None:
    hidden, weight = draw(7, 75, dtype=dtype), draw(38, 75, dtype=dtype, seed=4)
    options = surroundings(case, 7, 38, 75, dtype)
    expected = expected_linear(hidden, weight, **options)
    config = SkinnyConfig(16, 16, 2, 2, slices=slices)
    check(skinny(hidden, weight, config, **options), expected)


@settings(max_examples=25)
@given(
    tokens=st.sampled_from([1, 2, 7, 16, 17]),
    rows=st.integers(1, 40),
    depth=st.integers(1, 90),
    outputs=st.sampled_from([16, 32]),
    slices=st.sampled_from([1, 2]),
    adds=st.booleans(),
)
def test_any_cut_of_a_skinny_product_is_the_same_product(
    tokens: int, rows: int, depth: int, outputs: int, slices: int, adds: bool
) -> None:
    config = SkinnyConfig(outputs, 16, 2, 2, slices=slices)
    hidden = draw(tokens, depth, dtype=torch.float32)
    weight = draw(rows, depth, dtype=torch.float32, seed=4)
    residual = draw(tokens, rows, dtype=torch.float32, seed=5) if adds else None
    expected = expected_linear(hidden, weight, residual=residual)
    check(skinny(hidden, weight, config, residual=residual), expected)


def test_strided_rows_and_residual() -> None:
    packed = draw(5, 3 * 48, dtype=torch.float32)
    hidden = packed[:, 48:96]
    weight = draw(20, 48, dtype=torch.float32)
    residual = draw(5, 64, dtype=torch.float32)
    kept = residual.clone()
    expected = expected_linear(hidden, weight, residual=residual[:, 20:40])
    returned = skinny(hidden, weight, SkinnyConfig(16, 16, 2, 2), residual=residual[:, 20:40])
    check(returned, expected)
    assert returned.data_ptr() == residual[:, 20:].data_ptr()
    assert torch.equal(residual[:, :20], kept[:, :20])
    assert torch.equal(residual[:, 40:], kept[:, 40:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1), (17, 48), (2, 1500), (7, 3, 16), (1, 5, 24)])
def test_rms_norm_equals_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # Heads, and rows, are views of a packed projection.
    packed = draw(shape[0], 2 * shape[1], *shape[2:], dtype=dtype)
    hidden = packed[:, : shape[1]]
    weight = draw(shape[-1], dtype=dtype, seed=6)
    wide = hidden.double()
    norm = (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    actual = rms_norm(hidden, weight, EPS)
    assert actual.is_contiguous()
    check(actual, wide * norm * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (17, 40), (2, 2100)])
def test_silu_and_mul_equals_float64(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = draw(tokens, 2 * size + 8, dtype=dtype)[:, : 2 * size] * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up)


def test_no_rows_are_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)
    assert silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
