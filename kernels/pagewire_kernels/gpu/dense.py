"""Linears, norm and activation of bf16 and fp16 models on CUDA: the kernels, by number of rows."""

from __future__ import annotations

from typing import Any

import torch

from pagewire_kernels.dense import TorchDense
from pagewire_kernels.gpu.dense_gemv import gemv
from pagewire_kernels.gpu.dense_rows import rms_norm, silu_and_mul
from pagewire_kernels.gpu.dense_skinny import skinny

# From here on cuBLAS: its tiles are made for more rows.
SKINNY_ROWS = 16
_DTYPES = (torch.bfloat16, torch.float16)
_ARRIVALS = 4096


class TritonDense(TorchDense):
    """One row by a GEMV, up to 16 by a skinny product, more by cuBLAS; norm and gate by Triton.

    What is chosen follows from shapes and dtypes alone, so that every step can be captured in a
    CUDA graph. fp32 models, and int8 weights, are torch's: fp32 is meant to be exact. Launches of
    one instance must be of one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._arrivals = torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)

    def kernel_for(self, hidden: torch.Tensor, weight: Any) -> str:
        """What a linear is computed by: `gemv`, `skinny`, or `torch` (cuBLAS)."""
        plain = isinstance(weight, torch.Tensor) and weight.is_contiguous()
        if not plain or weight.dtype not in _DTYPES or hidden.stride(-1) != 1:
            return "torch"
        if not 1 <= len(hidden) <= SKINNY_ROWS:
            return "torch"
        return "gemv" if len(hidden) == 1 else "skinny"

    def linear(
        self, hidden: torch.Tensor, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        match self.kernel_for(hidden, weight):
            case "gemv":
                return gemv(hidden, weight, bias=bias)
            case "skinny":
                return self._skinny(hidden, weight, bias)
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
        kernel = self.kernel_for(hidden, weight)
        if kernel == "gemv":
            return gemv(hidden, weight, bias=bias, norm_weight=norm_weight, eps=eps)
        if kernel == "skinny" and _folds_norm(hidden):
            return skinny(hidden, weight, bias=bias, norm_weight=norm_weight, eps=eps)
        return super().norm_linear(hidden, norm_weight, eps, weight, bias)

    def norm_gate_up(
        self,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel = self.kernel_for(hidden, weight)
        if kernel == "gemv":
            return gemv(hidden, weight, bias=bias, norm_weight=norm_weight, eps=eps, gated=True)
        if kernel == "torch":
            return super().norm_gate_up(hidden, norm_weight, eps, weight, bias)
        if _folds_norm(hidden):
            return skinny(hidden, weight, bias=bias, norm_weight=norm_weight, eps=eps, gated=True)
        return skinny(self.rms_norm(hidden, norm_weight, eps), weight, bias=bias, gated=True)

    def linear_add(
        self,
        hidden: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        kernel = self.kernel_for(hidden, weight)
        if kernel == "gemv":
            return gemv(hidden, weight, bias=bias, residual=residual)
        if kernel == "skinny":
            return self._skinny(hidden, weight, bias, residual)
        if bias is None and isinstance(weight, torch.Tensor) and weight.dtype in _DTYPES:
            return residual.addmm_(hidden, weight.t())
        return super().linear_add(hidden, weight, bias, residual)

    def _skinny(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return skinny(hidden, weight, bias=bias, residual=residual, arrivals=self._arrivals)


def _folds_norm(hidden: torch.Tensor) -> bool:
    """Rows times the norm's weight, not yet divided by their size, may leave float16's range."""
    return hidden.dtype == torch.bfloat16
