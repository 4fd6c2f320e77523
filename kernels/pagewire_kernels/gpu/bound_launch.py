"""The short way to a kernel that was launched like this before.

Triton's own way binds and specialises the arguments, writes the options out as text to look the
compiled kernel up, prepares for hooks, and asks the driver about each pointer: some 30 us of Python
a launch, and a step of a small model takes as long as its launches. Here what Triton found is kept
under all that it could depend on:

- kernel and device, the names and values of constants and options;
- of each tensor its dtype and whether it begins at a multiple of 16 bytes;
- of each whole number whether it is 1, or a multiple of 16, as 32 bits;
- of other numbers (float, bool) their type; whether an argument is None.

That is at least as fine as Triton's own key (triton/runtime/jit.py and specialize.cc of 3.6).
Anything else is left to Triton: other versions of it, other devices than CUDA's, arguments of other
types, hooks, scratch memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Its launchers are called as this version makes them.
_KNOWN_TRITON = triton.__version__.startswith("3.6.")
_ALIGNMENT = 16
_INT32_MAX = 2**31 - 1


class _Bound(NamedTuple):
    """A compiled kernel and how it is started.

    Attributes:
        launcher: the function that Triton built for the kernel's signature.
        function: the driver's handle.
        cooperative: whether all programs must run at once.
        dependent: by programmatic dependent launch.
        metadata: number of warps, of blocks in a cluster, and bytes of shared memory.
        constants: the values of the kernel's last parameters.
        kernel: kept, as is `compiled`: the key has its id, and the handle is the other's.
        compiled: what the kernel was compiled to.
    """

    launcher: Any
    function: Any
    cooperative: Any
    dependent: Any
    metadata: Any
    constants: tuple[Any, ...]
    kernel: Any
    compiled: Any


# None: what Triton must launch itself, each time.
_bound: dict[tuple[Any, ...], _Bound | None] = {}


def launch_bound(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Launches as `kernel[grid](*arguments, **options)` does."""
    if not _KNOWN_TRITON or type(kernel) is not JITFunction or _is_observed(kernel):
        kernel[grid](*arguments, **options)
        return
    active: Any = driver.active
    device = active.get_current_device()
    key: list[Any] = [id(kernel), device, *options, *options.values()]
    values: list[Any] = []
    bits = 0
    for argument in arguments:
        kind = type(argument)
        if kind is torch.Tensor or kind is Parameter:
            pointer = argument.data_ptr()
            bits |= pointer
            values.append(pointer)
            key.append(argument.dtype)
            continue
        values.append(argument)
        if kind is int and -_INT32_MAX <= argument <= _INT32_MAX:
            key.append("1" if argument == 1 else "any" if argument % _ALIGNMENT else "16")
        elif kind is float or kind is bool or argument is None:
            key.append(kind)
        else:
            kernel[grid](*arguments, **options)
            return
    if bits % _ALIGNMENT:
        key += [value % _ALIGNMENT == 0 for value in values if type(value) is int]
    found = tuple(key)
    bound = _bound.get(found)
    if bound is None:
        compiled = kernel[grid](*arguments, **options)
        if found not in _bound:
            _bound[found] = _bind(kernel, device, len(arguments), options, compiled)
        return
    bound.launcher(
        grid[0],
        grid[1] if len(grid) > 1 else 1,
        grid[2] if len(grid) > 2 else 1,
        active.get_current_stream(device),
        bound.function,
        bound.cooperative,
        bound.dependent,
        None,
        None,
        bound.metadata,
        None,
        None,
        None,
        *values,
        *bound.constants,
    )


def _is_observed(kernel: Any) -> bool:
    """Whether somebody wants to be told of launches."""
    entered, left = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(
        kernel.pre_run_hooks or getattr(entered, "calls", entered) or getattr(left, "calls", left)
    )


def _bind(
    kernel: Any, device: int, num_arguments: int, options: dict[str, Any], compiled: Any
) -> _Bound | None:
    """What was just launched, for the next time; None where that must be Triton's again."""
    if not isinstance(compiled, CompiledKernel):
        return None
    target = kernel.device_caches[device][2]
    launcher = compiled.run
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if target.backend != "cuda" or scratch:
        return None
    given, constants = kernel.params[:num_arguments], kernel.params[num_arguments:]
    if any(parameter.is_constexpr for parameter in given):
        return None
    if not all(parameter.is_constexpr and parameter.name in options for parameter in constants):
        return None
    return _Bound(
        launcher.launch,
        compiled.function,
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        compiled.packed_metadata,
        tuple(options[parameter.name] for parameter in constants),
        kernel,
        compiled,
    )
