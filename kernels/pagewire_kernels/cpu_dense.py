"""C++ kernels for what lies between attentions on CPU: linears, norm, rotation, activation.

Weights are fp32, bfloat16, float16 or int8; everything else is fp32, whatever the model's dtype.
Inputs are rounded to 16 bits where they meet weights that are multiplied in pairs of those.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pagewire_kernels.cpu import DTYPES, load_library
from pagewire_kernels.cpu_decoder import CpuDecoder
from pagewire_kernels.cpu_lora import CpuLora
from pagewire_kernels.cpu_weights import PackedWeight
from pagewire_kernels.decoder import DecoderLayer, DecoderShape
from pagewire_kernels.dense import DenseBackend
from pagewire_kernels.huge_pages import HugePages
from pagewire_kernels.quantization import Int8Weight


class CpuDense(DenseBackend):
    """The dense kernels, on CPU tensors.

    A row's result is the same to the last bit whatever other rows are computed with it.
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        """Takes the library.

        Args:
            library: default: the one for this machine's processor.

        Raises:
            BackendUnavailableError: the kernels were not built.
        """
        self._library = library or load_library()
        self._memory = HugePages()

    def activations(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def pack(self, weight: torch.Tensor | Int8Weight | PackedWeight) -> PackedWeight:
        """Packs a weight [outputs, depth] once; the original is not needed any more."""
        if isinstance(weight, PackedWeight):
            return weight
        values = weight.values if isinstance(weight, Int8Weight) else weight
        if values.dtype not in DTYPES or values.device.type != "cpu" or values.stride(-1) != 1:
            raise ValueError(
                f"the dense cpu kernels pack rows of {', '.join(map(str, DTYPES))} in CPU memory, "
                f"not {values.dtype} on {values.device} with strides {values.stride()}"
            )
        outputs, depth = values.shape
        size = self._library.pagewire_panel_size()
        padded = self._library.pagewire_packed_depth(DTYPES[values.dtype], depth)
        panels = self._memory.empty((-(-outputs // size), padded, size), values.dtype)
        self._library.pagewire_pack_weight(
            DTYPES[values.dtype],
            values.data_ptr(),
            panels.data_ptr(),
            outputs,
            depth,
            values.stride(0),
            torch.get_num_threads(),
        )
        scales = None
        if isinstance(weight, Int8Weight):
            scales = torch.zeros(len(panels) * size)
            scales[:outputs] = weight.scales
        return PackedWeight(panels, scales, outputs, depth)

    def unpack_rows(self, weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as it was, in fp32: int64 [N] to [N, depth].

        Raises:
            IndexError: there is no such row.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < weight.outputs:
            raise IndexError(f"rows must lie in 0 to {weight.outputs - 1}, not {rows.tolist()}")
        output = torch.empty((rows.shape[0], weight.depth))
        rows = rows.contiguous()
        self._library.pagewire_unpack_rows(
            DTYPES[weight.panels.dtype],
            weight.panels.data_ptr(),
            _address(weight.scales),
            rows.data_ptr(),
            output.data_ptr(),
            rows.shape[0],
            weight.depth,
        )
        return output

    def linear(
        self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b: [T, depth] to [T, outputs]."""
        output = torch.empty((hidden.shape[0], weight.outputs))
        self._multiply(hidden, weight, bias, output, accumulate=False)
        return output

    def linear_add(
        self,
        hidden: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """residual + x W^T + b, [T, outputs], in place of the residual."""
        _check(residual)
        self._multiply(hidden, weight, bias, residual, accumulate=True)
        return residual

    def _multiply(
        self,
        hidden: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        output: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        _check(hidden)
        num_tokens, depth = hidden.shape
        if depth != weight.depth:
            raise ValueError(f"the input has {depth} columns, the weight {weight.depth}")
        if output.shape != (num_tokens, weight.outputs):
            raise ValueError(
                f"the residual is {list(output.shape)}, the product {[num_tokens, weight.outputs]}"
            )
        self._library.pagewire_linear(
            DTYPES[weight.panels.dtype],
            hidden.data_ptr(),
            weight.panels.data_ptr(),
            _address(weight.scales),
            _address(bias),
            output.data_ptr(),
            num_tokens,
            weight.outputs,
            depth,
            hidden.stride(0),
            output.stride(0),
            accumulate,
            torch.get_num_threads(),
        )

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As ops.rms_norm, over the last dimension."""
        size = hidden.shape[-1]
        rows = hidden.reshape(-1, size)
        _check(rows)
        output = torch.empty(hidden.shape)
        self._library.pagewire_rms_norm(
            rows.data_ptr(),
            _address(weight),
            output.data_ptr(),
            rows.shape[0],
            size,
            rows.stride(0),
            eps,
            torch.get_num_threads(),
        )
        return output

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """As ops.rotate: [T, H, D], cos [T, 1, D], sin [T, 1, D / 2]."""
        num_tokens, num_heads, head_dim = heads.shape
        if heads.stride()[1:] != (head_dim, 1) or not (cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError("a token's heads, and cosines and sines, must be contiguous")
        output = torch.empty(heads.shape)
        self._library.pagewire_rotate(
            heads.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            output.data_ptr(),
            num_tokens,
            num_heads,
            head_dim,
            heads.stride(0),
            output.stride(0),
            torch.get_num_threads(),
        )
        return output

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As ops.silu_and_mul: [T, 2 * size] to [T, size]."""
        _check(gate_up)
        num_tokens, width = gate_up.shape
        output = torch.empty((num_tokens, width // 2))
        self._library.pagewire_silu_and_mul(
            gate_up.data_ptr(),
            output.data_ptr(),
            num_tokens,
            width // 2,
            gate_up.stride(0),
            torch.get_num_threads(),
        )
        return output

    def decoder(self, shape: DecoderShape, layers: Sequence[DecoderLayer]) -> CpuDecoder:
        """The layers as one call; attention is this library's too."""
        return CpuDecoder(self._library, shape, layers)

    def lora(self) -> CpuLora:
        return CpuLora(self._library)


def _address(vector: torch.Tensor | None) -> int | None:
    """Where a vector of fp32 lies; None: there is none."""
    if vector is None:
        return None
    if vector.dtype != torch.float32 or not vector.is_contiguous():
        raise ValueError(
            f"the dense cpu kernels read contiguous float32 vectors, not {vector.dtype}"
        )
    return vector.data_ptr()


def _check(rows: torch.Tensor) -> None:
    """The C++ side trusts its pointers."""
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or rows.stride(-1) != 1:
        raise ValueError(
            f"the dense cpu kernels read float32 rows in CPU memory, not {rows.dtype} on "
            f"{rows.device} with strides {rows.stride()}"
        )
