"""Linears, norm and activation of bf16 and fp16 models on CUDA: the kernels, by shape."""

from __future__ import annotations

from typing import Any

import torch

from pagewire_kernels.dense import TorchDense
from pagewire_kernels.gpu.dense_cuts import choose_cut
from pagewire_kernels.gpu.dense_gemv import GemvConfig, gemv
from pagewire_kernels.gpu.dense_rows import rms_norm, silu_and_mul
from pagewire_kernels.gpu.dense_skinny import SkinnyConfig, skinny
from pagewire_kernels.gpu.lora import TritonLora

_DTYPES = (torch.bfloat16, torch.float16)


class TritonDense(TorchDense):
    """One row by a GEMV, some by a skinny product, more by cuBLAS; norm and gate by Triton.

    What is chosen follows from shapes and dtypes alone, so that every step can be captured in a
    CUDA graph. fp32 models, and int8 weights, are torch's: fp32 is meant to be exact.
    """

    def cut_for(self, hidden: torch.Tensor, weight: Any) -> GemvConfig | SkinnyConfig | None:
        """How a linear is cut, and so by which kernel; None: it is torch's, by cuBLAS."""
        plain = isinstance(weight, torch.Tensor) and weight.is_contiguous()
        if not plain or weight.dtype not in _DTYPES or hidden.stride(-1) != 1:
            return None
        return choose_cut(hidden.shape[0], *weight.shape)

    def linear(
        self, hidden: torch.Tensor, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        match self.cut_for(hidden, weight):
            case GemvConfig() as cut:
                return gemv(hidden, weight, cut, bias=bias)
            case SkinnyConfig() as cut:
                return skinny(hidden, weight, cut, bias=bias)
        return super().linear(hidden, weight, bias)

    def logits(self, hidden: torch.Tensor, weight: Any) -> torch.Tensor:
        """In the model's dtype: who reads them widens them on the way in."""
        return self.linear(hidden, weight)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if hidden.dtype not in _DTYPES or hidden.stride(-1) != 1:
            return super().rms_norm(hidden, weight, eps)
        return rms_norm(hidden, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype not in _DTYPES or gate_up.stride(-1) != 1:
            return super().silu_and_mul(gate_up)
        return silu_and_mul(gate_up)

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        match self.cut_for(hidden, weight):
            case GemvConfig() as cut:
                return gemv(hidden, weight, cut, bias=bias, norm_weight=norm_weight, eps=eps)
        return super().norm_linear(hidden, norm_weight, eps, weight, bias)

    def norm_gate_up(
        self,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        match self.cut_for(hidden, weight):
            case GemvConfig() as cut:
                return gemv(
                    hidden, weight, cut, bias=bias, norm_weight=norm_weight, eps=eps, gated=True
                )
            case SkinnyConfig() as cut:
                normed = self.rms_norm(hidden, norm_weight, eps)
                return skinny(normed, weight, cut, bias=bias, gated=True)
        return super().norm_gate_up(hidden, norm_weight, eps, weight, bias)

    def linear_add(
        self,
        hidden: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        match self.cut_for(hidden, weight):
            case GemvConfig() as cut:
                return gemv(hidden, weight, cut, bias=bias, residual=residual)
            case SkinnyConfig() as cut:
                return skinny(hidden, weight, cut, bias=bias, residual=residual)
        if bias is None and isinstance(weight, torch.Tensor) and weight.dtype in _DTYPES:
            return residual.addmm_(hidden, weight.t())
        return super().linear_add(hidden, weight, bias, residual)

    def lora(self) -> TritonLora:
        return TritonLora()
