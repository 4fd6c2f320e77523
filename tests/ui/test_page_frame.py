"""What holds for every tab: names for all controls, room on a phone, fast switches between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import FITS, nameless_controls, page_at
from tests.ui.fake_adapters import FakeAdapters
from tests.ui.fake_inference import FakeInference
from tests.ui.fake_observability import FakeObservability

TABS = {
    "Compare": "#compare-ask",
    "Adapters": "#adapters-table table",
    "Templates": "#template-editor .cm-editor",
    "Tokenizer": "#token-text, textarea",
    "Engine": "#engine svg",
    "Chat": "#message textarea",
}
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def engine() -> FakeObservability:
    return FakeObservability()


@pytest.fixture(scope="module")
def frontend(frontend_port: int, engine: FakeObservability) -> Iterator[FakeInference]:
    adapters = FakeAdapters()
    adapters.add("a-name-long-enough-to-need-more-room-than-a-phone-s-line-has")
    fake = FakeInference(engine, adapters)
    fake.start(frontend_port)
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def opened(browser: Browser, page_url: str, frontend: FakeInference) -> Iterator[Page]:
    with page_at(browser, page_url, height=800) as page:
        yield page


@pytest.mark.parametrize("tab", TABS)
def test_each_tab_has_names_for_its_controls_and_fits_a_phone(opened: Page, tab: str) -> None:
    opened.set_viewport_size(DESKTOP)
    opened.get_by_role("tab", name=tab).click()
    expect(opened.locator(TABS[tab]).locator("visible=true").first).to_be_visible()
    assert nameless_controls(opened) == []
    opened.set_viewport_size(PHONE)
    opened.wait_for_function(FITS)
    assert nameless_controls(opened) == []


def test_on_a_phone_the_whole_composer_is_seen(opened: Page) -> None:
    opened.set_viewport_size(DESKTOP)
    opened.get_by_role("tab", name="Chat").click()
    # The tabs take two lines on a phone and one on a desktop; the room that is left is used.
    for size in (PHONE, DESKTOP):
        opened.set_viewport_size(size)
        opened.wait_for_function(
            """() => {
              const box = document.querySelector("#message").getBoundingClientRect();
              return box.height && box.bottom <= innerHeight && box.bottom > innerHeight - 60;
            }"""
        )


@pytest.mark.slow
def test_who_goes_on_to_another_tab_fast_finds_it_filled(
    browser: Browser, page_url: str, frontend: FakeInference, engine: FakeObservability
) -> None:
    page = browser.new_page(viewport=DESKTOP)
    for number, last in enumerate(("Engine", "Adapters", "Engine")):
        page.goto(page_url)
        expect(page.locator("#head")).to_contain_text("fake-model")
        # In one go: nothing of the first switches is answered when the last comes.
        page.evaluate(
            """(last) => {
              const tabs = [...document.querySelectorAll("[role=tab]")];
              const at = (name) => tabs.find((tab) => tab.textContent.trim() === name);
              for (const name of ["Compare", "Templates", "Tokenizer", last]) at(name).click();
            }""",
            last,
        )
        expect(page.locator(TABS[last]).first).to_be_visible()
        if last == "Engine":  # and it goes on being drawn
            engine.num_waiting = 20 + number
            waiting = page.locator('#engine [data-figure="waiting"] b')
            expect(waiting).to_have_text(str(20 + number))
    page.close()
