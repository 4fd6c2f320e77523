"""Rounding weights to int8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pagewire_kernels.dense import TorchDense
from pagewire_kernels.quantization import quantize_int8


@given(
    outputs=st.integers(0, 9),
    depth=st.integers(1, 40),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)
def test_an_element_is_off_by_half_a_step_of_its_row(
    outputs: int, depth: int, seed: int, magnitude: float
) -> None:
    weight = torch.randn(outputs, depth, generator=torch.Generator().manual_seed(seed)) * magnitude
    quantized = quantize_int8(weight)
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((quantized.dequantized() - weight).abs() <= steps * 0.5001).all()
    assert (quantized.values.abs() <= 127).all()


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 5)
    weight[1, 0] = 3.0
    assert torch.equal(quantize_int8(weight).dequantized(), weight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_does_not_become_finite(bad: float) -> None:
    weight = torch.ones(2, 5)
    weight[1, 2] = bad
    result = F.linear(torch.ones(3, 5), quantize_int8(weight).dequantized())
    assert torch.equal(result[:, 0], torch.full((3,), 5.0))
    assert not result[:, 1].isfinite().any()


def test_many_rows_are_rounded_as_few() -> None:
    weight = torch.randn(3000, 200, generator=torch.Generator().manual_seed(0))
    together = quantize_int8(weight)
    alone = quantize_int8(weight[2990:])
    assert torch.equal(together.values[2990:], alone.values)
    assert torch.equal(together.scales[2990:], alone.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_computes_with_the_rounded_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden = torch.randn(3, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    quantized = quantize_int8(weight)
    got = TorchDense().linear(hidden, quantized)
    assert got.dtype == dtype
    torch.testing.assert_close(got, F.linear(hidden, quantized.dequantized()))
