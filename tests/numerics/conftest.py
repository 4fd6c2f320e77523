"""The models that numerics compare with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire_kernels import build
from tests.fakes.tiny_models import TINY_MODELS, write_tiny_model

# The C++ kernels are compiled on first use, where there is a compiler.
_BACKENDS = ["torch", "cpu"] if build.find_compiler() is not None else ["torch"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The real model takes torch's kernels long, and tiny models show them right."""
    for item in items:
        if isinstance(item, pytest.Function) and "smollm2_path" in item.fixturenames:
            parameters = getattr(item, "callspec", None)
            if parameters and parameters.params.get("backend") == "torch" and len(_BACKENDS) > 1:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder with a tiny model, and the same in transformers."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return folder, write_tiny_model(folder, request.param)


# Of the session, it would take modules apart: pytest runs all tests with one value, then all with
# the next, and each module's models would be made for either.
@pytest.fixture(scope="module", params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each attention backend (and the dense kernels that go with it) of this machine."""
    if request.param == "cpu":
        build.build()
    return str(request.param)
