"""A browser on the chat page: Debian's chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
# To be waited for: what is laid out by script hears of a new size a moment later.
FITS = "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@contextmanager
def launched_browser() -> Iterator[Browser]:
    """A headless browser, closed at the end."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "these tests need Debian's chromium (apt-get install chromium)"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield launched
        launched.close()


@contextmanager
def page_at(browser: Browser, url: str, *, height: int = 900, **options: Any) -> Iterator[Page]:
    """The page as a visitor of its own has it, once it has heard of its model."""
    # A page of the browser's own would be the only one that its context may have.
    context = browser.new_context(viewport={"width": 1280, "height": height}, **options)
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#head")).to_contain_text("fake-model")
    yield page
    context.close()


def send(page: Page, text: str) -> None:
    """Types a message and sends it. While an answer is on its way, even if all of it is to be seen,
    the page would not take it."""
    expect(page.locator("#conversation")).not_to_have_attribute("aria-busy", "true")
    box = page.locator("#message textarea")
    box.fill(text)
    box.press("Enter")


def answer(page: Page) -> Locator:
    """The last answer on the page."""
    return page.locator("#conversation .bot.message").last


SCREENSHOTS = Path(__file__).parent / "screenshots"
_PHONE = {"width": 390, "height": 844}


def take_pictures(page: Page, name: str) -> None:
    """Keeps the page as it is, light and dark and on a phone's width, for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)
    desktop = page.viewport_size
    for style, dark, size in (("light", 0, desktop), ("dark", 1, desktop), ("phone", 1, _PHONE)):
        page.evaluate("dark => document.body.classList.toggle('dark', Boolean(dark))", dark)
        if size is not None:
            page.set_viewport_size(size)  # type: ignore[arg-type]  # it is one
        sidebar = page.locator(".sidebar .toggle-button")
        if size is _PHONE and sidebar.count():
            sidebar.evaluate("node => node.click()")
            page.wait_for_timeout(300)  # until it has slid away
        # As it is once colours have faded over.
        page.screenshot(path=SCREENSHOTS / f"{name}-{style}.png", animations="disabled")
    page.evaluate("document.body.classList.remove('dark')")
    if sidebar.count():
        sidebar.evaluate("node => node.click()")
    if desktop is not None:
        page.set_viewport_size(desktop)


def nameless_controls(page: Page) -> list[str]:
    """What can be operated on the page, and has no name for those who can't see it."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("button, textarea, input, select, [role=tab]")]
          .filter((node) => node.checkVisibility() && !(node.getAttribute("aria-label")
            || node.getAttribute("aria-labelledby") || node.labels?.length || node.title
            || node.textContent.trim() || node.closest("label")))
          .map((node) => node.outerHTML.slice(0, 200))"""
    )
    return found


def log_in(page: Page, user: str, password: str) -> None:
    """Fills in the login."""
    page.get_by_label("username").fill(user)
    page.get_by_label("password").fill(password)
    page.get_by_role("button", name="Login").click()


def choose(page: Page, label: str, option: str) -> None:
    """Picks an option of a dropdown."""
    box = page.get_by_label(label, exact=True)
    box.click()
    # Of its own list: another's may be fading away.
    options = page.locator(f'[id="{box.get_attribute("aria-controls")}"]')
    options.get_by_role("option", name=option, exact=True).click()


def new_chat(page: Page) -> None:
    """Begins another conversation."""
    page.get_by_role("tab", name="Chat").click()
    page.locator("#new-chat").click()
    expect(page.locator("#conversation .placeholder")).to_be_visible()


def write_template(page: Page, source: str) -> None:
    """Puts a text into the editor of templates in place of what is there."""
    page.locator("#template-editor .cm-content").fill(source)
