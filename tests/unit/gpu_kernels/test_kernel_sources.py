"""What the interpreter lets pass and the compiler refuses: seen in the kernels' sources."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

import pagewire_kernels.gpu


def kernels() -> Iterator[Any]:
    """Every function that `triton.jit` made, in any module of the package."""
    for module_info in pkgutil.iter_modules(pagewire_kernels.gpu.__path__):
        module = importlib.import_module(f"pagewire_kernels.gpu.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, InterpretedFunction) and value.fn.__module__ == module.__name__:
                yield value


def is_known_to_the_compiler(value: Any) -> bool:
    """As triton.compiler.code_generator looks up a name that is not local."""
    return (
        isinstance(value, types.ModuleType | InterpretedFunction | tl.constexpr | tl.dtype)
        or getattr(value, "__triton_builtin__", False)
        or getattr(value, "__module__", "").startswith("triton.language")
    )


@pytest.mark.parametrize("kernel", list(kernels()), ids=lambda kernel: kernel.fn.__qualname__)
def test_a_kernel_names_nothing_that_the_compiler_does_not_know(kernel: Any) -> None:
    """Annotations of arguments too: `query: Any` compiles nowhere, `query: tl.tensor` does."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    assert isinstance(function, ast.FunctionDef)
    looked_at = [function.args, *function.body]
    names = {
        node.id
        for part in looked_at
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    scope = kernel.fn.__globals__
    unknown = {
        name
        for name in names - set(kernel.fn.__code__.co_varnames)
        if not hasattr(builtins, name) and not is_known_to_the_compiler(scope[name])
    }
    assert not unknown
