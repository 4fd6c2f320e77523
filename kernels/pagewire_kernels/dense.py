"""What a layer computes between attentions: one interface over torch and the C++ kernels."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from pagewire_kernels import ops
from pagewire_kernels.quantization import Int8Weight

# MKL repacks the right operand of a product. Of a matrix as tall as an output embedding that is
# dear for few rows; as the left operand it is read once: 1.3 (32 rows) to 2 times (4) as fast.
_TALL = 16384
_FEW_ROWS = 32


class DenseBackend(Protocol):
    """Linears, norm, rotation and activation."""

    def activations(self, dtype: torch.dtype) -> torch.dtype:
        """What a model of this dtype computes in between its weights; vectors must have it."""
        ...

    def pack(self, weight: Any) -> Any:
        """A weight in the form `linear` reads: itself, or a packed copy.

        Args:
            weight: [outputs, depth], its Int8Weight, or what `pack` returned before.
        """
        ...

    def unpack_rows(self, weight: Any, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a packed weight: int64 [N] to [N, depth]. An embedding's look-up."""
        ...

    def linear(
        self, hidden: torch.Tensor, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b: [T, depth] to [T, outputs]; rows may be strided."""
        ...

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ops.rms_norm."""
        ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See ops.rotate."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ops.silu_and_mul."""
        ...


class TorchDense:
    """The reference, on any device and dtype."""

    def activations(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack(self, weight: Any) -> Any:
        return weight

    def unpack_rows(self, weight: torch.Tensor | Int8Weight, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, Int8Weight):
            return weight.rows(rows)
        return F.embedding(rows, weight)

    def linear(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | Int8Weight,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(weight, Int8Weight):
            return F.linear(hidden, weight.dequantized(), bias)
        few = 1 < len(hidden) <= _FEW_ROWS and len(weight) >= _TALL
        if few and bias is None and hidden.device.type == "cpu":
            return torch.mm(weight, hidden.t()).t().contiguous()
        return F.linear(hidden, weight, bias)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return ops.rms_norm(hidden, weight, eps)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return ops.rotate(heads, cos, sin)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul(gate_up)


def load_dense_backend(attention_backend: str, device: torch.device) -> DenseBackend:
    """The one that goes with an attention backend: C++ with `cpu`, else torch."""
    if attention_backend != "cpu" or device.type != "cpu":
        return TorchDense()
    from pagewire_kernels.cpu_dense import CpuDense

    dense: DenseBackend = CpuDense()
    return dense
