"""The models that numerics compare with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import TINY_MODELS, write_tiny_model


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder with a tiny model, and the same in transformers."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return folder, write_tiny_model(folder, request.param)
