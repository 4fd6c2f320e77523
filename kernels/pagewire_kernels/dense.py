"""What a layer computes between attentions: one interface over torch and the C++ kernels."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from pagewire_kernels import ops
from pagewire_kernels.decoder import Decoder, DecoderLayer, DecoderShape
from pagewire_kernels.lora import LoraBackend, TorchLora
from pagewire_kernels.quantization import Int8Weight

# MKL repacks the right operand of a product. Of a matrix as tall as an output embedding that is
# dear for few rows; as the left operand it is read once: 1.3 (32 rows) to 2 times (4) as fast.
_TALL = 16384
_FEW_ROWS = 32


class DenseBackend(ABC):
    """Linears, norm, rotation and activation, and the compositions of them that a layer needs.

    A backend that can compute a composition in fewer passes overrides it.
    """

    @abstractmethod
    def activations(self, dtype: torch.dtype) -> torch.dtype:
        """What a model of this dtype computes in between its weights; vectors must have it."""

    @abstractmethod
    def pack(self, weight: Any) -> Any:
        """A weight in the form `linear` reads: itself, or a packed copy.

        Args:
            weight: [outputs, depth], its Int8Weight, or what `pack` returned before.
        """

    @abstractmethod
    def unpack_rows(self, weight: Any, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a packed weight: int64 [N] to [N, depth]. An embedding's look-up."""

    @abstractmethod
    def linear(
        self, hidden: torch.Tensor, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b: [T, depth] to [T, outputs]; rows may be strided."""

    @abstractmethod
    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ops.rms_norm."""

    @abstractmethod
    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See ops.rotate."""

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ops.silu_and_mul."""

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A linear of the RMS norm: [T, depth] to [T, outputs]."""
        return self.linear(self.rms_norm(hidden, norm_weight, eps), weight, bias)

    def norm_gate_up(
        self,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """SwiGLU's product over the RMS norm: [T, depth] to [T, size].

        Args:
            hidden: [T, depth].
            norm_weight: [depth].
            eps: the norm's.
            weight: [2 * size, depth]; the gate's rows come first.
            bias: [2 * size].
        """
        return self.silu_and_mul(self.norm_linear(hidden, norm_weight, eps, weight, bias))

    def linear_add(
        self,
        hidden: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """residual + x W^T + b, [T, outputs], in place of the residual."""
        return residual.add_(self.linear(hidden, weight, bias))

    def logits(self, hidden: torch.Tensor, weight: Any) -> torch.Tensor:
        """A linear whose product may be fp32 or, on a GPU, of the model's dtype: [R, vocab]."""
        return self.linear(hidden, weight).float()

    def decoder(self, shape: DecoderShape, layers: Sequence[DecoderLayer]) -> Decoder | None:
        """All these layers of norm, attention with rotary positions, norm and SwiGLU as one; None
        where they are better computed one operation after another."""
        return None

    def lora(self) -> LoraBackend:
        """The adapters' kernels that go with these."""
        return TorchLora()


class TorchDense(DenseBackend):
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
    """The one that goes with an attention backend.

    On CPU it is C++ with `cpu`, on CUDA Triton, where that is installed, with all but `torch`; else
    it is torch, the reference.
    """
    if attention_backend == "cpu" and device.type == "cpu":
        from pagewire_kernels.cpu_dense import CpuDense

        return CpuDense()
    if attention_backend != "torch" and device.type == "cuda" and _has_triton():
        from pagewire_kernels.gpu.dense import TritonDense

        return TritonDense()
    return TorchDense()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
