"""Builds the C++ kernels once for the tests that need them."""

from __future__ import annotations

import pytest

from pagewire_kernels import build, cpu


@pytest.fixture(scope="session")
def built_kernels() -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()
    cpu.load_library()
