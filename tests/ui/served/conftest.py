"""One served stack for all of this folder, and a visitor for each file of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.serve_process import Served
from tests.ui.served.stack import served_stack, write_adapters
from tests.ui.served.visitor import open_page, visitor


@pytest.fixture(scope="session")
def lora_dir(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """The served engine's adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, smollm2_path)
    return folder


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, lora_dir: Path
) -> Iterator[Served]:
    with served_stack(tmp_path_factory.mktemp("served"), smollm2_path, lora_dir) as stack:
        yield stack


@pytest.fixture(scope="module")
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with visitor(browser) as context:
        yield open_page(context, served.page)
