"""The engine dies while it answers, and the visitor hardly sees it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.serve_process import Served
from tests.ui.browser import answer, send
from tests.ui.served.visitor import fresh_chat

pytestmark = pytest.mark.slow

ENGINE = "pagewire_engine.cli"


def test_an_answer_goes_on_when_the_engine_is_killed_and_the_next_is_as_ever(
    page: Page, served: Served
) -> None:
    fresh_chat(page, max_tokens=120)
    send(page, "Write a long story about a dragon who counts blocks.")
    drawn = answer(page).locator(".pw-markdown").last
    expect(drawn).to_contain_text(re.compile(r"(\w+ ){8}"))
    before = drawn.inner_text()
    died = served.process.children()[ENGINE]
    died.kill()
    figures = answer(page).locator(".pw-figures")
    expect(figures).to_contain_text("prompt", timeout=150_000)
    expect(answer(page).get_by_role("alert")).not_to_be_visible()
    whole = drawn.inner_text()
    assert whole.startswith(before[:20])
    assert len(whole) > len(before)
    assert served.process.children()[ENGINE].pid != died.pid
    # The same words as from an engine that lives (temperature 0).
    answer(page).get_by_role("button", name="Ask again").click()
    expect(figures).to_contain_text("prompt")
    assert drawn.inner_text() == whole
