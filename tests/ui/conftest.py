"""The chat page in a process of its own, and a browser on it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.fakes.ports import free_port
from tests.ui.browser import launched_browser


@pytest.fixture(scope="package")
def frontend_port() -> int:
    return free_port()


@pytest.fixture(scope="package")
def page_url(frontend_port: int) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire_ui.cli", f"--frontend=127.0.0.1:{frontend_port}",
         f"--port={port}", "--log-level=warning"],
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            break
        except OSError:
            assert process.poll() is None, "the page ended at start"
            assert time.monotonic() < deadline, "the page did not start"
            time.sleep(0.1)
    yield url
    process.terminate()
    assert process.wait(timeout=20) == 0


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with launched_browser() as launched:
        yield launched


@pytest.fixture
def page(browser: Browser, page_url: str) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(20_000)
    opened.goto(page_url)
    yield opened
    opened.close()
