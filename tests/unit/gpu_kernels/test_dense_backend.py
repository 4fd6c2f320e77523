"""TritonDense answers as the reference does, by the kernel that goes with the number of rows."""

from __future__ import annotations

import pytest
import torch

from pagewire_kernels.dense import TorchDense
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu.dense import TritonDense
from pagewire_kernels.quantization import quantize_int8

EPS = 1e-5
DEPTH, OUTPUTS, MANY_OUTPUTS = 64, 48, 8200


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) / 2).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=1e-2)


@pytest.fixture(scope="module")
def dense() -> TritonDense:
    return TritonDense()


CASES = [
    (0, OUTPUTS, None),
    (1, OUTPUTS, "dense_gemv"),
    (2, OUTPUTS, "dense_skinny"),
    (16, OUTPUTS, "dense_skinny"),
    (17, OUTPUTS, None),
]


@pytest.mark.parametrize(
    ("rows", "outputs", "kernel", "with_bias"),
    [
        *((*case, with_bias) for case in CASES for with_bias in (False, True)),
        (33, MANY_OUTPUTS, "dense_skinny", True),
        (65, MANY_OUTPUTS, None, False),
    ],
)
def test_fused_operations_equal_their_compositions(
    rows: int, outputs: int, kernel: str | None, with_bias: bool, dense: TritonDense
) -> None:
    reference = TorchDense()
    hidden, weight = draw(rows, DEPTH), draw(outputs, DEPTH)
    norm_weight = draw(DEPTH)
    bias = draw(outputs) if with_bias else None
    residual = draw(rows, outputs)
    expected_sum = residual + reference.linear(hidden, weight, bias)
    norm = (norm_weight, EPS)
    with recorded() as launches:
        close(dense.linear(hidden, weight, bias), reference.linear(hidden, weight, bias))
        close(
            dense.norm_linear(hidden, *norm, weight, bias),
            reference.norm_linear(hidden, *norm, weight, bias),
        )
        close(
            dense.norm_gate_up(hidden, *norm, weight, bias),
            reference.norm_gate_up(hidden, *norm, weight, bias),
        )
        returned = dense.linear_add(hidden, weight, bias, residual)
    close(returned, expected_sum)
    assert returned.data_ptr() == residual.data_ptr()
    linears = {name: launches[name] for name in ("dense_gemv", "dense_skinny") if launches[name]}
    assert linears == ({kernel: 4} if kernel else {})
    # A GEMV folds both norms and the activation in, a skinny product the activation.
    assert launches["rms_norm_rows"] == (0 if rows < 2 else 2)
    assert launches["silu_and_mul_rows"] == (1 if rows and kernel is None else 0)


def test_a_norm_does_not_leave_float16s_range(dense: TritonDense) -> None:
    weight, norm_weight = draw(OUTPUTS, DEPTH), torch.full((DEPTH,), 2.0, dtype=torch.float16)
    for rows in (1, 3):
        # The rows times the norm's weight leave float16's range; divided by their size they don't.
        hidden = draw(rows, DEPTH).sign() * 6e4
        expected = TorchDense().norm_linear(
            hidden.float(), norm_weight.float(), EPS, weight.float()
        )
        close(dense.norm_linear(hidden, norm_weight, EPS, weight), expected)


def test_logits_keep_the_models_dtype(dense: TritonDense) -> None:
    hidden, weight = draw(2, DEPTH), draw(OUTPUTS, DEPTH)
    logits = dense.logits(hidden, weight)
    assert logits.dtype == torch.float16
    close(logits, TorchDense().logits(hidden, weight))


def test_float32_is_torchs_to_the_last_bit(dense: TritonDense) -> None:
    hidden, weight = draw(2, DEPTH, dtype=torch.float32), draw(OUTPUTS, DEPTH, dtype=torch.float32)
    norm_weight = draw(DEPTH, dtype=torch.float32)
    with recorded() as launches:
        actual = dense.norm_gate_up(hidden, norm_weight, EPS, weight)
    assert torch.equal(actual, TorchDense().norm_gate_up(hidden, norm_weight, EPS, weight))
    assert not launches


def test_int8_weights_are_served(dense: TritonDense) -> None:
    hidden, weight = draw(2, DEPTH), quantize_int8(draw(OUTPUTS, DEPTH))
    assert dense.cut_for(hidden, weight) is None
    residual = draw(2, OUTPUTS)
    expected = residual + TorchDense().linear(hidden, weight)
    close(dense.linear_add(hidden, weight, None, residual), expected)


def test_weights_that_are_not_whole_rows_are_served(dense: TritonDense) -> None:
    hidden, weight = draw(2, DEPTH), draw(DEPTH, OUTPUTS).t()
    assert dense.cut_for(hidden, weight) is None
    close(dense.linear(hidden, weight), TorchDense().linear(hidden, weight))
