"""How the Triton kernels are launched."""

from __future__ import annotations

from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire_kernels.dispatch_record import note

__all__ = ["gdc_launch_dependents", "gdc_wait", "has_dependent_launch", "launch"]


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels there may start while the one before them ends.

    Programmatic dependent launch needs compute capability 9.0. A kernel launched so must call
    `gdc_wait` before it reads what an earlier kernel wrote or writes what one may still read; since
    every one does, the end of the kernel before means the end of all before that.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, dependent: bool = False, **options: Any
) -> None:
    """Launches a kernel and notes it by its name.

    Args:
        kernel: a function that `triton.jit` made.
        grid: number of programs in each dimension; nothing is launched where one is 0.
        arguments: the kernel's.
        dependent: by programmatic dependent launch; the kernel must have been told to wait.
        options: constants of the kernel by name, and Triton's options such as num_warps.
    """
    if 0 in grid:
        return
    if dependent:
        options["launch_pdl"] = True
    kernel[grid](*arguments, **options)
    note(kernel.__name__)
