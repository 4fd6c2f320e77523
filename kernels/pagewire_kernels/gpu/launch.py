"""How the Triton kernels are launched, and compiled before that."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire_kernels.dispatch_record import note
from pagewire_kernels.gpu.bound_launch import launch_bound

__all__ = [
    "compiled_only",
    "gdc_launch_dependents",
    "gdc_wait",
    "has_dependent_launch",
    "launch",
]

_MOST_COMPILERS = 16
_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


@functools.cache  # asked at every launch
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
    if _only_compiles.get():
        kernel.warmup(*arguments, grid=grid, **options)
        return
    launch_bound(kernel, grid, arguments, options)
    note(kernel.__name__)


@contextmanager
def compiled_only() -> Iterator[None]:
    """What this thread launches meanwhile is compiled and not run: nothing is written.

    A launch takes no time; a pool of threads compiles, side by side, and all is compiled at the
    end. What was compiled once is found in Triton's cache on disk. What can't be compiled is left
    to its first real launch, which tells why.
    """
    threads = min(os.cpu_count() or 1, _MOST_COMPILERS)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)
