"""Norm, rotary and activation in plain torch, written for few passes over memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension (arXiv:1910.07467), computed in fp32."""
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def gather_rotation(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate` takes, of int64 positions [T].

    Args:
        cos: [max_positions, D / 2].
        sin: the same.
        positions: int64 [T].
        dtype: of what will be rotated.

    Returns:
        cos [T, 1, D] and sin [T, 1, D / 2].
    """
    half = cos[positions].to(dtype)
    return torch.cat((half, half), dim=-1).unsqueeze(1), sin[positions].to(dtype).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv:2104.09864) in the GPT-NeoX pairing: i with i + D/2.

    Args:
        heads: [T, H, D]; rows may be strided.
        cos: [T, 1, D], the D/2 cosines twice.
        sin: [T, 1, D/2].

    Returns:
        [T, H, D], contiguous.
    """
    half = heads.shape[-1] // 2
    rotated = heads * cos
    rotated[..., :half].addcmul_(heads[..., half:], sin, value=-1)
    rotated[..., half:].addcmul_(heads[..., :half], sin)
    return rotated


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product (arXiv:2002.05202): silu of the first half of the columns times the rest."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
