"""A visitor's browser that reaches nothing but this machine, and what is checked of any page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.e2e.serve_process import MODEL
from tests.ui.browser import choose, new_chat

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TABS = ("Chat", "Compare", "Adapters", "Templates", "Tokenizer", "Engine")
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_EVERYTHING = re.compile("")


@contextmanager
def visitor(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A browser without a network: asking another host, or an error in a script, fails the test."""
    wrong: list[str] = []

    def answer(route: Route) -> None:
        address = urlsplit(route.request.url)
        if address.hostname in _LOOPBACK or address.scheme in ("data", "blob"):
            route.continue_()
        else:
            wrong.append(f"asked {route.request.url}")
            route.abort()

    context = browser.new_context(viewport=DESKTOP, accept_downloads=True, **options)  # type: ignore[arg-type]  # it is one
    try:
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.route(_EVERYTHING, answer)
        context.on("weberror", lambda failure: wrong.append(f"error {failure.error}"))
        yield context
    finally:
        context.close()
    assert wrong == []


def open_page(context: BrowserContext, url: str, *, max_tokens: int = 24) -> Page:
    """The page with settings that give the same short answers each time."""
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#head")).to_contain_text(MODEL)
    # Whoever is faster loses the focus to it, and a list of options that was open is closed.
    expect(page.locator("#message textarea")).to_be_focused()
    choose(page, "Sampling", "Precise")
    page.locator("#max-tokens textarea").fill(str(max_tokens))
    return page


def fresh_chat(page: Page, *, max_tokens: int = 24, model: str = MODEL) -> None:
    """Another conversation, precise and short, with this model and no system prompt."""
    new_chat(page)
    page.locator("#system-prompt textarea").fill("")
    choose(page, "Model", model)
    choose(page, "Sampling", "Precise")
    page.locator("#max-tokens textarea").fill(str(max_tokens))


def barriers(page: Page) -> list[str]:
    """What keeps people out who can't see, point or tell colours apart, as axe finds it."""
    # Colours fade over when dark becomes light; and axe knows no filters, by which the editor's
    # colours are darkened.
    page.add_style_tag(content="* { transition: none !important; }")
    found = Axe().run(page, {"exclude": [".cm-line span"]}).response["violations"]
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]
