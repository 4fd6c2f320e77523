"""A tiny model's folder, for tests that load one but do not judge its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_model(folder, "llama-llama3-rope-tied")
    return folder
