"""GPU kernels on the CPU, by Triton's interpreter: each file runs in a process of its own.

Triton decides when it is imported whether it interprets, and other tests of the suite (on a machine
with a GPU) import it to compile. Inside such a process, or where TRITON_INTERPRET=1 is set by hand,
the files are collected as usual, and not left out as slow: `TRITON_INTERPRET=1 pytest
tests/unit/gpu_kernels -k NAME`.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class InterpretedFile(pytest.File):
    """A file of tests, as one test."""

    def collect(self) -> Iterator[pytest.Item]:
        run: InterpretedRun = InterpretedRun.from_parent(self, name="interpreted")
        run.add_marker(pytest.mark.slow)
        yield run


class InterpretedRun(pytest.Item):
    """Passes if the file's tests do, and there are some."""

    def runtest(self) -> None:
        arguments = ["-q", "-p", "no:cacheprovider", "--no-header", str(self.path)]
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.config.rootpath,
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            pytest.fail(f"{result.stdout}\n{result.stderr}", pytrace=False)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> InterpretedFile | None:
    if INTERPRETED:
        return None
    file: InterpretedFile = InterpretedFile.from_parent(parent, path=module_path)
    return file


if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_tensors = interpreter._patch_lang_tensor

    def _patch_tensors_and_indexes(tensor: Any, scope: Any) -> None:
        """Scalars are arrays of one element there, which numpy 2.4 no longer takes for indexes."""
        _patch_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensors_and_indexes

    _patch_language = interpreter._patch_lang

    def _patch_language_once(function: Any) -> Any:
        """Triton does it again whenever one function calls another, which took half of the time."""
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        languages = [module for module in modules if module in (tl, tl.core)]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return _patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_language_once
