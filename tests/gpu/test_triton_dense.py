"""The dense kernels at the sizes of real models: exact within rounding, and free of races."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagewire_kernels.dense import DenseBackend, TorchDense, load_dense_backend
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu.dense_cuts import choose_cut
from pagewire_kernels.gpu.dense_gemv import GemvConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

EPS = 1e-5
# Norm of the error by norm of the result: a handful of roundings in a row.
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# (rows, depth) of qkv, o, gate and up, down of Llama 3.2 1B, then of Llama 3.1 8B, and a head.
SHAPES = [
    (3072, 2048),
    (2048, 2048),
    (16384, 2048),
    (2048, 8192),
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 2048),
    (960, 576),
    (576, 1536),
]
TOKENS = (1, 2, 8, 16, 17, 32, 64, 65)


def dense_on_cuda() -> DenseBackend:
    return load_dense_backend("triton", torch.device("cuda"))


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[actual.dtype]
    # No single number is off by more than a few of its own roundings.
    worst = (actual.double() - expected).abs() / (expected.abs() + expected.std())
    assert worst.max() < 8 * TOLERANCE[actual.dtype]


def normed(hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = hidden.double()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * scale.double()


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_operation_equals_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape))
    dense = dense_on_cuda()
    rows, depth = shape
    weight = draw(rows, depth, dtype=dtype, scale=depth**-0.5)
    scale, bias = draw(depth, dtype=dtype), draw(rows, dtype=dtype)
    wide = weight.double().T
    for tokens in TOKENS:
        hidden = draw(tokens, depth, dtype=dtype)
        residual = draw(tokens, rows, dtype=dtype)
        with recorded() as launches:
            plain = dense.linear(hidden, weight, bias)
            after_norm = dense.norm_linear(hidden, scale, EPS, weight)
            gated = dense.norm_gate_up(hidden, scale, EPS, weight)
            added = dense.linear_add(hidden, weight, None, residual.clone())
        cut = choose_cut(tokens, rows, depth)
        if cut is not None:
            assert launches["dense_gemv" if isinstance(cut, GemvConfig) else "dense_skinny"] == 4
        product = hidden.double() @ wide
        product_of_norm = normed(hidden, scale) @ wide
        gate, up = product_of_norm.chunk(2, dim=-1)
        check(plain, product + bias.double())
        check(after_norm, product_of_norm)
        # Both halves' roundings meet in the gate.
        check(gated, torch.nn.functional.silu(gate) * up)
        check(added, residual.double() + product)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_norm_and_activation_equal_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    dense = dense_on_cuda()
    for tokens in (1, 16, 300):
        packed = draw(tokens, 48, 128, dtype=dtype)
        scale = draw(128, dtype=dtype)
        check(dense.rms_norm(packed[:, :32], scale, EPS), normed(packed[:, :32], scale))
        for size in (576, 4096, 14336):
            hidden, scale = draw(tokens, size, dtype=dtype), draw(size, dtype=dtype)
            check(dense.rms_norm(hidden, scale, EPS), normed(hidden, scale))
            gate, up = hidden.double().chunk(2, dim=-1)
            check(dense.silu_and_mul(hidden), torch.nn.functional.silu(gate) * up)


def step(dense: DenseBackend, layers: list[Any], first: torch.Tensor, scale: torch.Tensor) -> Any:
    """A step's linears, each launch reading what the one before wrote, buffers used again."""
    residual = first.clone()
    for qkv, o, gate_up, down in layers:
        attended = dense.norm_linear(residual, scale, EPS, qkv)[:, : len(o)]
        residual = dense.linear_add(attended, o, None, residual)
        product = dense.norm_gate_up(residual, scale, EPS, gate_up)
        residual = dense.linear_add(product, down, None, residual)
    return dense.rms_norm(residual, scale, EPS)


@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 128])
def test_a_captured_chain_has_no_races(tokens: int) -> None:
    """Launches overlap: what one reads too early, or writes too early, shows as different bits.

    With more rows cuBLAS's kernels, which know nothing of that, stand between.
    """
    torch.manual_seed(2)
    size, dtype = 1024, torch.bfloat16
    shapes = ((1536, size), (size, size), (8192, size), (size, 4096))
    layers = [[draw(*s, dtype=dtype, scale=s[1] ** -0.5) for s in shapes] for _ in range(12)]
    first, scale = draw(tokens, size, dtype=dtype), torch.ones(size, dtype=dtype, device="cuda")
    dense = dense_on_cuda()
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the weights may not have been drawn yet
        with torch.cuda.stream(stream):
            alone = step(dense, layers, first, scale)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step(dense, layers, first, scale)
        for _ in range(200):
            graph.replay()
            assert torch.equal(output, alone)
        wide = [[weight.double() for weight in layer] for layer in layers]
        expected = step(TorchDense(), wide, first.double(), scale.double())
    assert (output.double() - expected).norm() / expected.norm() < 0.03


def test_only_torchs_own_attention_has_torchs_own_linears() -> None:
    device = torch.device("cuda")
    for name in ("triton", "xformers"):
        assert type(load_dense_backend(name, device)).__name__ == "TritonDense"
    assert type(load_dense_backend("torch", device)) is TorchDense
