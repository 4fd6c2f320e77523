"""Who can reach the page and how: small screens, keyboards, screen readers, a login, a proxy. That
it asks no other host is checked of every page of this folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.serve_process import MODEL, Served
from tests.ui.browser import FITS, answer, log_in, nameless_controls, send, take_pictures
from tests.ui.page_process import page_process, reverse_proxy
from tests.ui.served.visitor import DESKTOP, PHONE, TABS, barriers, fresh_chat, visitor

pytestmark = pytest.mark.slow

_SHOWN = {
    "Chat": "#message textarea",
    "Compare": "#compare-ask",
    "Adapters": "#adapters-table .pw-hint",
    "Templates": "#prompt-preview .pw-token >> nth=0",
    "Tokenizer": "#tokenizer-tokens .pw-token >> nth=0",
    "Engine": "#engine .tile >> nth=0",
}


@pytest.mark.parametrize("tab", TABS)
def test_no_tab_keeps_anybody_out(page: Page, tab: str) -> None:
    page.set_viewport_size(DESKTOP)
    if tab == "Chat":
        fresh_chat(page)
        send(page, "What is the capital of France?")
        expect(answer(page).locator(".pw-actions")).to_be_visible()
    page.get_by_role("tab", name=tab).click()
    expect(page.locator(_SHOWN[tab])).to_be_visible()
    for dark in (False, True):
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", dark)
        assert barriers(page) == []
    page.evaluate("document.body.classList.remove('dark')")
    assert nameless_controls(page) == []
    page.set_viewport_size(PHONE)
    page.wait_for_function(FITS)
    page.set_viewport_size(DESKTOP)


def test_the_dark_page_is_what_a_dark_system_gets(browser: Browser, served: Served) -> None:
    colours = []
    for scheme in ("light", "dark"):
        with visitor(browser, color_scheme=scheme) as context:
            page = context.new_page()
            page.goto(served.page)
            expect(page.locator("#head")).to_contain_text(MODEL)
            background = "getComputedStyle(document.body).background"
            colours.append(page.evaluate(f"{background}Color"))
    assert colours[0] == "rgb(255, 255, 255)"
    assert sum(map(int, re.findall(r"\d+", colours[1])[:3])) < 150, colours


def test_the_keyboard_alone_chats(page: Page) -> None:
    fresh_chat(page, max_tokens=300)
    box = page.locator("#message textarea")
    box.focus()
    page.keyboard.type("Write a long story about a dragon.")
    page.keyboard.press("Enter")
    expect(answer(page).locator(".pw-markdown").last).to_contain_text(re.compile(r"\w+ \w+"))
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("stopped by you")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit text")).to_be_focused()
    page.keyboard.press("Escape")
    # Tabs by arrows, as everywhere else.
    page.get_by_role("tab", name="Chat").focus()
    for key, label in (("ArrowRight", "Compare"), ("ArrowLeft", "Chat"), ("ArrowLeft", "Engine")):
        page.keyboard.press(key)
        tab = page.get_by_role("tab", name=label)
        expect(tab).to_have_attribute("aria-selected", "true")
        expect(tab).to_be_focused()


@pytest.fixture(scope="module")
def guarded(served: Served) -> Iterator[str]:
    """The served model's page once more, with a login and under a path at a proxy."""
    port = int(served.grpc.rpartition(":")[2])
    with (
        page_process(port, "--root-path=/tools/chat", PAGEWIRE_AUTH="ann:s3cret") as own,
        reverse_proxy(own, "/tools/chat") as url,
    ):
        yield url


def test_behind_a_login_and_a_proxy_it_is_the_same(
    browser: Browser, guarded: str, tmp_path: Path
) -> None:
    with visitor(browser) as context:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(guarded)
        log_in(page, "ann", "wrong")
        expect(page.get_by_text("Incorrect")).to_be_visible()
        log_in(page, "ann", "s3cret")
        expect(page.locator("#head")).to_contain_text(MODEL)
        page.locator("#max-tokens textarea").fill("24")
        send(page, "What is the capital of France?")
        expect(answer(page).locator(".pw-actions")).to_be_visible()
        for tab in TABS:
            page.get_by_role("tab", name=tab).click()
            expect(page.locator(_SHOWN[tab])).to_be_visible()
        take_pictures(page, "served-behind-proxy")
        assert all("/tools/chat" in url for url in asked if url.startswith("http")), asked
