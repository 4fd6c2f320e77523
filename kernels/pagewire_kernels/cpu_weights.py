"""How the C++ kernels keep a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedWeight:
    """A linear's weight in the order its kernel reads it.

    Attributes:
        panels: [ceil(outputs / P), packed depth, P]; P outputs lie side by side.
        scales: fp32 [ceil(outputs / P) * P] of int8 panels, else None.
        outputs: rows of the weight that was packed.
        depth: its columns.
    """

    panels: torch.Tensor
    scales: torch.Tensor | None
    outputs: int
    depth: int
