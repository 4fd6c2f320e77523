"""What a layer computes between attentions: one interface over torch and the C++ kernels."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from pagewire_kernels import ops

# MKL repacks the right operand of a product. Of a matrix as tall as an output embedding that is
# dear for few rows; as the left operand it is read once: 1.3 (32 rows) to 2 times (4) as fast.
_TALL = 16384
_FEW_ROWS = 32


class DenseBackend(Protocol):
    """Linears, norm, rotation and activation."""

    def pack(self, weight: torch.Tensor) -> Any:
        """A weight [outputs, depth] in the form `linear` reads: itself, or a packed copy."""
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

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def unpack_rows(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, weight)

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
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


def load_dense_backend(
    attention_backend: str, device: torch.device, dtype: torch.dtype
) -> DenseBackend:
    """The one that goes with an attention backend: C++ with `cpu` in fp32, else torch."""
    if attention_backend != "cpu" or device.type != "cpu" or dtype != torch.float32:
        return TorchDense()
    from pagewire_kernels.cpu_dense import CpuDense

    dense: DenseBackend = CpuDense()
    return dense
