"""The tab of templates before the frontend itself, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.fakes.fake_engine_client import FakeEngineClient
from tests.ui.browser import choose, page_at
from tests.ui.threaded_frontend import threaded_frontend


@pytest.fixture(scope="module")
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture(scope="module")
def opened(
    browser: Browser, page_url: str, frontend_port: int, engine: FakeEngineClient
) -> Iterator[Page]:
    with (
        threaded_frontend(engine, grpc_port=frontend_port, allow_request_chat_template=True),
        page_at(browser, page_url) as page,
    ):
        yield page


@pytest.fixture
def editor(opened: Page) -> Page:
    opened.get_by_role("tab", name="Templates").click()
    choose(opened, "Template", "Model: default")
    opened.locator("#restore-template").click()
    expect(opened.locator("#prompt-count")).to_contain_text("161 tokens")
    return opened
