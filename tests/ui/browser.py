"""A browser on the chat page: Debian's chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

# Milliseconds.
expect.set_options(timeout=30_000)
# The flags keep it from asking anything of any host but the page's.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def launched_browser() -> Iterator[Browser]:
    """A headless browser, closed at the end."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "these tests need Debian's chromium (apt-get install chromium)"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield launched
        launched.close()


def send(page: Page, text: str) -> None:
    """Types a message and sends it."""
    box = page.locator("#message textarea")
    box.fill(text)
    box.press("Enter")


def answer(page: Page) -> Locator:
    """The last answer on the page."""
    return page.locator("#conversation .bot.message").last
