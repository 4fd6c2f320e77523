"""Compiles Triton kernels for an H100 on any machine, from calls of the functions that launch them.

The interpreter takes much that the compiler refuses. ptxas comes with Triton; only running needs a
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_HOPPER = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launches(module: Any, call: Callable[[], object]) -> list[Any]:
    """What a call launches, compiled as for a device with dependent launch; nothing is run.

    Args:
        module: where `launch` is looked up, and `has_dependent_launch` if it is.
        call: calls functions of the module with CPU tensors.

    Returns:
        The compiled kernels; `asm["ptx"]` is their code.
    """
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        launches.append((kernel, arguments, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", note)
        patch.setattr(module, "has_dependent_launch", lambda device: True, raising=False)
        call()
    return [_compile(*launch) for launch in launches]


def _compile(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    names = kernel.arg_names
    constants = {(names.index(name),): options[name] for name in options if name in names}
    constants |= {(place,): None for place, value in enumerate(arguments) if value is None}
    signature = dict(zip(names, map(_type, arguments), strict=False))
    signature |= {name: "constexpr" for name in options if name in names}
    alike = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor)
        or (
            isinstance(argument, int)
            and argument % 16 == 0
            and index not in kernel.do_not_specialize
        )
    }
    alike |= {
        (index, place): [["tt.divisibility", 16]]
        for index, argument in enumerate(arguments)
        if isinstance(argument, tuple)
        for place in range(len(argument))
    }
    source = ASTSource(kernel, signature, constants, alike)
    compiler_options = {
        name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if name in options
    }
    launch_pdl = options.get("dependent", False)
    return triton.compile(
        source, target=_HOPPER, options={**compiler_options, "launch_pdl": launch_pdl}
    )


def _type(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_type, argument))
    if isinstance(argument, torch.Tensor):
        return _TYPES[argument.dtype]
    if argument is None:
        return "constexpr"
    return "fp32" if isinstance(argument, float) else "i32"
