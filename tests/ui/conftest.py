"""The chat page in a process of its own, and a browser on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.fakes.ports import free_port
from tests.ui.browser import launched_browser
from tests.ui.fake_inference import FakeInference
from tests.ui.page_process import page_process


@pytest.fixture(scope="session")
def frontend_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def page_url(frontend_port: int) -> Iterator[str]:
    with page_process(frontend_port) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # While it lives, playwright's event loop runs in this thread: asynchronous tests can't.
    with launched_browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def frontend(frontend_port: int) -> Iterator[FakeInference]:
    """What the page talks to."""
    fake = FakeInference()
    fake.start(frontend_port)
    yield fake
    fake.stop()


@pytest.fixture
def page(browser: Browser, page_url: str) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(20_000)
    opened.goto(page_url)
    yield opened
    opened.close()
