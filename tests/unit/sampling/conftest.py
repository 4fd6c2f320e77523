"""Both backends of token choice; the C++ one is built once."""

from __future__ import annotations

import pytest

from pagewire_kernels import build, cpu
from pagewire_kernels.sampling import TokenChooser, TorchChooser


@pytest.fixture(scope="session", params=["torch", "cpu"])
def chooser(request: pytest.FixtureRequest) -> TokenChooser:
    if request.param == "torch":
        return TorchChooser()
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    build.build()
    return cpu.load_chooser()
