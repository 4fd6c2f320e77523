"""The dense C++ kernels against torch, and against themselves in other batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pagewire_kernels import ops
from pagewire_kernels.cpu_dense import CpuDense
from pagewire_kernels.dense import TorchDense
from pagewire_kernels.quantization import Int8Weight, quantize_int8

pytestmark = pytest.mark.usefixtures("built_kernels")
KINDS = ["float32", "bfloat16", "float16", "int8"]


@pytest.fixture
def dense() -> CpuDense:
    return CpuDense()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weight_of(kind: str, outputs: int, depth: int) -> torch.Tensor | Int8Weight:
    weight = random(outputs, depth)
    return quantize_int8(weight) if kind == "int8" else weight.to(getattr(torch, kind))


def packed_unit(dense: CpuDense, dtype: torch.dtype) -> int:
    """What the depth of packed weights is a multiple of: pairs, or the tiles of a register."""
    weight = torch.zeros(1, 1)
    plain = quantize_int8(weight) if dtype == torch.int8 else weight.to(dtype)
    return dense.pack(plain).panels.shape[1]


def rounded_inputs(dense: CpuDense, hidden: torch.Tensor) -> torch.Tensor:
    """What the kernels of int8 weights compute with: [T, depth] in fp64.

    16 bits, and a scale for each token and stretch of at most 512 inputs, of which there are as
    few as possible and each as long.
    """
    unit = packed_unit(dense, torch.int8)
    units = -(-hidden.shape[1] // unit)
    length = unit * -(-units // -(-units // (512 // unit)))
    parts, most = [], torch.tensor(32767.0)
    for part in hidden.split(length, dim=1):
        largest = part.abs().amax(dim=1, keepdim=True)
        multiples = (part.double() * (most / largest).double()).round()
        parts.append(multiples * (largest / most).double())
    return torch.cat(parts, dim=1)


def multiplied_inputs(dense: CpuDense, kind: str, hidden: torch.Tensor) -> torch.Tensor:
    """What the kernels compute with, in fp64, for each kind of weights."""
    if kind == "int8":
        return rounded_inputs(dense, hidden)
    # Where they go in pairs or tiles, the processor's own products of bfloat16 are used.
    rounded = kind == "bfloat16" and packed_unit(dense, torch.bfloat16) > 1
    return (hidden.bfloat16() if rounded else hidden).double()


def widened(weight: torch.Tensor | Int8Weight) -> torch.Tensor:
    return weight.dequantized() if isinstance(weight, Int8Weight) else weight.float()


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 6, 7, 13, 17, 32, 33, 96, 97, 200])
@pytest.mark.parametrize(
    ("outputs", "depth"), [(64, 32), (1, 7), (50, 33), (257, 96), (16, 1), (20, 1101)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_torch(
    dense: CpuDense, tokens: int, outputs: int, depth: int, kind: str, with_bias: bool
) -> None:
    hidden, weight = random(tokens, depth), weight_of(kind, outputs, depth)
    bias = random(outputs) if with_bias else None
    got = dense.linear(hidden, dense.pack(weight), bias)
    wide = widened(weight).double()
    inputs = multiplied_inputs(dense, kind, hidden)
    expected = F.linear(inputs, wide, None if bias is None else bias.double())
    torch.testing.assert_close(got, expected.float(), atol=1e-5 * depth**0.5, rtol=1e-5)


@given(
    tokens=st.integers(1, 9),
    depth=st.integers(1, 1200),
    magnitude=st.sampled_from([0.0, 1e-36, 1e-20, 1.0, 1e20]),
    outlier=st.sampled_from([1.0, 1000.0]),
    seed=st.integers(0, 1000),
)
def test_rounding_inputs_costs_half_a_step_each(
    tokens: int, depth: int, magnitude: float, outlier: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, depth, generator=generator) * magnitude
    hidden[:, 0] *= outlier
    weight = quantize_int8(torch.randn(33, depth, generator=generator))
    dense = CpuDense()
    got = dense.linear(hidden, dense.pack(weight)).double()
    wide = weight.dequantized().double()
    exact = F.linear(hidden.double(), wide)
    step = hidden.double().abs().amax(dim=1, keepdim=True) / 32767
    # What rounding may move, and what sums in fp32 and numbers near zero lose.
    allowed = step / 2 * wide.abs().sum(dim=1) + hidden.double().abs() @ wide.abs().t() * 1e-6
    assert ((got - exact).abs() <= allowed * 1.001 + 1e-28).all()


@pytest.mark.parametrize("depth", [511, 512, 513, 4096])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_int8_do_not_overflow(dense: CpuDense, depth: int, sign: int) -> None:
    weight = dense.pack(quantize_int8(torch.ones(40, depth)))
    got = dense.linear(torch.full((7, depth), 3.0 * sign), weight)
    torch.testing.assert_close(got, torch.full((7, 40), 3.0 * sign * depth))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("depth", [576, 1101])
def test_linear_gives_a_row_the_same_bits_in_any_batch(
    dense: CpuDense, threads: int, depth: int, kind: str
) -> None:
    weight, bias = dense.pack(weight_of(kind, 301, depth)), random(301)
    hidden = random(150, depth)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = dense.linear(hidden, weight, bias)
        for first, last in [(0, 1), (149, 150), (7, 9), (3, 10), (0, 17), (0, 32), (60, 130)]:
            alone = dense.linear(hidden[first:last], weight, bias)
            assert torch.equal(alone, together[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_what_is_not_finite_stays_in_its_row_and_shows_there(
    dense: CpuDense, kind: str, tokens: int
) -> None:
    hidden = random(tokens, 64)
    hidden[0, 5] = torch.nan
    got = dense.linear(hidden, dense.pack(weight_of(kind, 33, 64)))
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()
    hidden[0, 5] = torch.inf
    assert not dense.linear(hidden, dense.pack(weight_of(kind, 33, 64)))[0].isfinite().any()


@pytest.mark.parametrize("kind", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_memory_that_runs_out_is_an_error_and_not_the_end(kind: str) -> None:
    program = """
import resource, sys, torch
from pagewire_kernels.cpu_dense import CpuDense
from pagewire_kernels.quantization import quantize_int8
dense, depth = CpuDense(), 1 << 20
weight = torch.ones(1, depth)
weight = dense.pack(quantize_int8(weight) if sys.argv[1] == "int8" else weight)
few = torch.ones(1, depth)
assert dense.linear(few, weight).item() == depth  # its threads are there now
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    dense.linear(few.expand(96, depth), weight)
except MemoryError as error:
    assert "max_num_batched_tokens" in str(error)
    assert dense.linear(few, weight).item() == depth
    print("refused")
"""
    command = [sys.executable, "-c", program, kind]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("refused\n", "")


def test_linear_reads_strided_rows(dense: CpuDense) -> None:
    wide, weight = random(9, 100), random(40, 30)
    torch.testing.assert_close(
        dense.linear(wide[:, 50:80], dense.pack(weight)), F.linear(wide[:, 50:80], weight)
    )


def test_packed_rows_come_back_as_they_were(dense: CpuDense) -> None:
    weight = random(77, 50)
    rows = torch.tensor([76, 0, 16, 15, 76, 31])
    assert torch.equal(dense.unpack_rows(dense.pack(weight), rows), weight[rows])
    for kind in KINDS:
        narrow = weight_of(kind, 77, 50)
        got = dense.unpack_rows(dense.pack(narrow), rows)
        assert torch.equal(got, widened(narrow)[rows])
        assert torch.equal(got, TorchDense().unpack_rows(narrow, rows).float())


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there_is_refused(dense: CpuDense, row: int) -> None:
    with pytest.raises(IndexError, match="0 to 4"):
        dense.unpack_rows(dense.pack(random(5, 6)), torch.tensor([0, row]))


def test_what_is_packed_is_not_packed_again(dense: CpuDense) -> None:
    packed = dense.pack(random(5, 6))
    assert dense.pack(packed) is packed


@pytest.mark.parametrize("size", [1, 7, 64, 576, 1001])
def test_rms_norm_equals_torch(dense: CpuDense, size: int) -> None:
    hidden, weight = random(5, 3, size) * 3, random(size)
    torch.testing.assert_close(
        dense.rms_norm(hidden, weight, 1e-5), ops.rms_norm(hidden, weight, 1e-5)
    )
    rows = random(6, 2 * size)[:, :size]
    torch.testing.assert_close(dense.rms_norm(rows, weight, 0.1), ops.rms_norm(rows, weight, 0.1))


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (1, 8), (3, 10), (5, 128)])
def test_rotate_equals_torch(dense: CpuDense, heads: int, head_dim: int) -> None:
    packed = random(7, heads + 2, head_dim)[:, :heads]
    angles = random(7, head_dim // 2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).unsqueeze(1)
    sin = angles.sin().unsqueeze(1)
    torch.testing.assert_close(
        dense.rotate(packed, cos, sin), ops.rotate(packed, cos, sin), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("size", [1, 7, 64, 1536])
def test_silu_and_mul_equals_torch(dense: CpuDense, size: int) -> None:
    gate_up = random(6, 2 * size) * 8
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, 0.0
    torch.testing.assert_close(
        dense.silu_and_mul(gate_up), ops.silu_and_mul(gate_up), atol=1e-6, rtol=1e-5
    )


def test_other_tensors_are_refused(dense: CpuDense) -> None:
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        dense.pack(random(8, 8).double())
    with pytest.raises(ValueError, match="float32 rows"):
        dense.linear(random(8, 8).bfloat16(), dense.pack(random(8, 8)))
    with pytest.raises(ValueError, match="float32 rows"):
        dense.linear(random(8, 8).t(), dense.pack(random(8, 8)))
    with pytest.raises(ValueError, match="float32 vectors"):
        dense.linear(random(8, 8), dense.pack(random(8, 8)), random(8).bfloat16())
    with pytest.raises(ValueError, match="8 columns, the weight 9"):
        dense.linear(random(2, 8), dense.pack(random(4, 9)))
