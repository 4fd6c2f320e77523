"""Where requests may bring no chat template, the page says which flag would let them."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.fakes.fake_engine_client import FakeEngineClient
from tests.ui.browser import take_pictures
from tests.ui.threaded_frontend import threaded_frontend

pytestmark = pytest.mark.slow


def test_where_templates_are_not_taken_the_page_names_the_flag(
    browser: Browser, page_url: str, frontend_port: int
) -> None:
    with threaded_frontend(FakeEngineClient(), grpc_port=frontend_port):
        page = browser.new_page()
        page.goto(page_url)
        expect(page.locator("#head")).to_contain_text("fake-model")
        page.get_by_role("tab", name="Templates").click()
        expect(page.get_by_role("note")).to_contain_text("--allow-request-chat-template")
        # The model's own is shown as the prompt it makes.
        expect(page.locator("#prompt-count")).to_contain_text("161 tokens")
        take_pictures(page, "templates-not-allowed")
        page.close()
