"""A GPU on which kernels take no time and do nothing: what is left of a launch is the host's.

Triton binds arguments, chooses a compiled kernel and calls its launcher as on an H100; the compiler
and the launcher are fakes. To be imported where Triton is installed and does not interpret.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver

# No machine has it: what Triton keeps by device is not mixed with what was compiled.
_DEVICE = 4095


class NullLauncher:
    """As Triton's driver builds one for a kernel; keeps the arguments of each launch."""

    global_scratch_size = 0
    profile_scratch_size = 0
    launch_cooperative_grid = False

    def __init__(self, kernel: NullKernel, launched: list[tuple[Any, ...]] | None) -> None:
        self.launch_pdl = kernel.options.get("launch_pdl", False)
        self._kernel = kernel
        self._launched = launched

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *rest: Any
    ) -> None:
        self.launch(
            grid_x, grid_y, grid_z, stream, function, False, self.launch_pdl, None, None, *rest
        )

    def launch(self, *arguments: Any) -> None:
        metadata, entered, left = arguments[10:13]
        if entered is not None:
            entered(metadata)
        if self._launched is not None:
            self._launched.append((self._kernel, *arguments))
        if left is not None:
            left(metadata)


class NullKernel(CompiledKernel):  # type: ignore[misc]  # triton is untyped
    """What compiling gives: only what it was compiled for."""

    def __init__(
        self, src: ASTSource, options: dict[str, Any], launched: list[tuple[Any, ...]] | None
    ) -> None:
        self.src, self.options = src, options
        self.name = src.fn.__name__
        self.metadata = SimpleNamespace(num_warps=options["num_warps"], num_ctas=1, shared=0)
        self.packed_metadata = (options["num_warps"], 1, 0)
        self.module, self.function = object(), id(self)
        self._run = NullLauncher(self, launched)


class _NullDriver:
    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def null_gpu(launched: list[tuple[Any, ...]] | None = None) -> Iterator[None]:
    """Kernels launched meanwhile do nothing.

    Args:
        launched: where each launch of what is compiled meanwhile is noted: the kernel, and what its
            launcher was called with.
    """

    def compile_nothing(src: ASTSource, options: dict[str, Any], **_: Any) -> NullKernel:
        return NullKernel(src, options, launched)

    with (
        mock.patch.object(driver, "_active", _NullDriver()),
        mock.patch.object(triton.compiler, "compile", compile_nothing),
    ):
        yield
