"""C++ kernels for what lies between attentions on CPU: linears, norm, rotation, activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagewire_kernels.cpu import load_library


@dataclass(frozen=True)
class PackedWeight:
    """A linear's weight in the order its kernel reads it.

    Attributes:
        panels: fp32 [ceil(outputs / P), depth, P]; P outputs lie side by side.
        outputs: rows of the weight that was packed.
        depth: its columns.
    """

    panels: torch.Tensor
    outputs: int
    depth: int


class CpuDense:
    """The dense kernels, on fp32 CPU tensors.

    A row's result is the same to the last bit whatever other rows are computed with it.
    """

    def __init__(self) -> None:
        """Loads the library.

        Raises:
            BackendUnavailableError: the kernels were not built.
        """
        self._library = load_library()

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Packs a weight [outputs, depth] once; the original is not needed any more."""
        outputs, depth = weight.shape
        _check(weight)
        panel = self._library.pagewire_panel_size()
        panels = torch.empty((-(-outputs // panel), depth, panel))
        self._library.pagewire_pack_weight(
            weight.data_ptr(),
            panels.data_ptr(),
            outputs,
            depth,
            weight.stride(0),
            torch.get_num_threads(),
        )
        return PackedWeight(panels, outputs, depth)

    def unpack_rows(self, weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as it was: int64 [N] to fp32 [N, depth]."""
        output = torch.empty((rows.shape[0], weight.depth))
        rows = rows.contiguous()
        self._library.pagewire_unpack_rows(
            weight.panels.data_ptr(),
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
        _check(hidden)
        num_tokens, depth = hidden.shape
        if depth != weight.depth:
            raise ValueError(f"the input has {depth} columns, the weight {weight.depth}")
        output = torch.empty((num_tokens, weight.outputs))
        self._library.pagewire_linear(
            hidden.data_ptr(),
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            num_tokens,
            weight.outputs,
            depth,
            hidden.stride(0),
            output.stride(0),
            torch.get_num_threads(),
        )
        return output

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As ops.rms_norm, over the last dimension."""
        size = hidden.shape[-1]
        rows = hidden.reshape(-1, size)
        _check(rows)
        output = torch.empty(hidden.shape)
        self._library.pagewire_rms_norm(
            rows.data_ptr(),
            weight.data_ptr(),
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


def _check(rows: torch.Tensor) -> None:
    """The C++ side trusts its pointers."""
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or rows.stride(-1) != 1:
        raise ValueError(
            f"the dense cpu kernels read float32 rows in CPU memory, not {rows.dtype} on "
            f"{rows.device} with strides {rows.stride()}"
        )
