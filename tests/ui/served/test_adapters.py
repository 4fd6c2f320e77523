"""Adapters of the served model: loaded, chosen, compared, updated and unloaded by a visitor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.serve_process import MODEL, Served
from tests.ui.adapters_tab import fill, row
from tests.ui.browser import answer, choose, send, take_pictures
from tests.ui.served.stack import write_noise
from tests.ui.served.visitor import fresh_chat, open_page

pytestmark = pytest.mark.slow

# Keeps what the note under the table told, for progress is over in a moment.
_LISTEN = """() => {
  const note = document.querySelector("#adapters-note");
  window.told = [];
  new MutationObserver(() => window.told.push(note.textContent.trim())).observe(
    note, {subtree: true, childList: true, characterData: true});
}"""


def note(page: Page) -> Locator:
    return page.locator("#adapters-note")


def load(page: Page, name: str, folder: str) -> None:
    """Loads an adapter."""
    page.get_by_role("tab", name="Adapters").click()
    fill(page, name, folder)
    page.locator("#load").click()
    expect(note(page)).to_contain_text(f"Loaded {name}: rank")


def unload(page: Page, name: str, *, first: str = "wait for its requests") -> None:
    """Asks for an adapter's end."""
    page.get_by_role("tab", name="Adapters").click()
    choose(page, "Adapter", name)
    page.get_by_label(first).check()
    page.locator("#unload").click()


def label(name: str) -> str:
    """How the list of models names an adapter."""
    return f"{name} (adapter of {MODEL})"


@pytest.fixture(scope="module")
def pirate(page: Page) -> Iterator[str]:
    load(page, "pirate", "pirate")
    yield "pirate"
    unload(page, "pirate")
    expect(note(page)).to_contain_text("Unloaded pirate")


@pytest.fixture(scope="module")
def noisy(page: Page) -> Iterator[str]:
    load(page, "noisy", "noise")
    yield "noisy"
    unload(page, "noisy")
    expect(note(page)).to_contain_text("Unloaded noisy")


def test_without_adapters_the_table_says_so(page: Page) -> None:
    page.get_by_role("tab", name="Adapters").click()
    expect(page.locator("#adapters-table")).to_contain_text("No adapter is loaded")
    expect(page.locator("#adapters-table")).to_contain_text("At most 2 adapters in one step")
    page.get_by_label("Folder", exact=True).click()
    folders = page.get_by_role("option").all_inner_texts()
    assert {"pirate", "own-text", "noise"} <= {each.strip("✓ \n") for each in folders}
    page.keyboard.press("Escape")
    take_pictures(page, "served-adapters-none")


def test_a_load_tells_its_progress_then_lineage_and_memory(page: Page) -> None:
    page.get_by_role("tab", name="Adapters").click()
    page.evaluate(_LISTEN)
    load(page, "heard", "noise")
    told = page.evaluate("window.told")
    assert any(re.match(r"Loading heard … \d+ s", each) for each in told), told
    for text in (f"{MODEL} → heard", "q_proj", "553.0 kB host", "0 running", "in host memory"):
        expect(row(page, "heard")).to_contain_text(text)
    unload(page, "heard")
    expect(row(page, "heard")).to_have_count(0)


def test_what_can_not_be_loaded_is_said(page: Page, noisy: str) -> None:
    page.get_by_role("tab", name="Adapters").click()
    for name, folder, told in (
        (noisy, "noise", f"{noisy} is loaded already"),
        ("lost", "missing", "missing"),
        ("out", "../../etc", "--lora-dir"),
        ("pickle", "pickled", "a pickle"),
        ("wide", "too-wide", "rank"),
        (MODEL, "noise", f"'{MODEL}' is the served model's name; choose another"),
    ):
        fill(page, name, folder)
        page.locator("#load").click()
        expect(note(page).get_by_role("alert")).to_contain_text(told)
    take_pictures(page, "served-adapters-error")


def test_an_update_in_place_makes_a_new_version(page: Page, noisy: str, lora_dir: Path) -> None:
    page.get_by_role("tab", name="Adapters").click()
    version = row(page, noisy).locator("code").inner_text()
    write_noise(lora_dir / "noise", seed=8)
    fill(page, noisy, "noise")
    page.locator("#update").click()
    expect(note(page)).to_contain_text(f"Updated {noisy}: rank 4")
    expect(row(page, noisy).locator("code")).not_to_have_text(version)
    expect(row(page, noisy)).to_have_count(1)


def test_an_adapter_is_picked_for_a_chat(page: Page, pirate: str) -> None:
    fresh_chat(page, model=label(pirate))
    send(page, "Hello!")
    expect(answer(page)).to_contain_text(re.compile("arr|matey|ahoy", re.IGNORECASE))
    expect(answer(page).locator(".pw-figures")).to_contain_text("pirate · ")
    fresh_chat(page)
    send(page, "Hello!")
    expect(answer(page).locator(".pw-actions")).to_be_visible()
    expect(answer(page)).not_to_contain_text(re.compile("arr|matey|ahoy", re.IGNORECASE))


def test_base_and_adapter_answer_side_by_side(page: Page, pirate: str) -> None:
    page.get_by_role("tab", name="Compare").click()
    choose(page, "Left", MODEL)
    choose(page, "Right", label(pirate))
    page.get_by_label("Question").fill("What is the capital of France?")
    page.locator("#compare-ask").click()
    left, right = page.locator(".pw-side").first, page.locator(".pw-side").last
    for side in (left, right):
        expect(side.locator(".pw-actions")).to_be_visible()
        expect(side.locator(".pw-figures")).to_contain_text("tok/s")
        expect(side).to_contain_text("Paris")
    expect(right).to_contain_text(re.compile("arr|matey|ahoy", re.IGNORECASE))
    expect(left).not_to_contain_text(re.compile("matey|ahoy", re.IGNORECASE))
    take_pictures(page, "served-compare")
    page.get_by_role("tab", name="Adapters").click()
    expect(row(page, pirate)).to_contain_text("737.3 kB host")
    take_pictures(page, "served-adapters")


def test_an_unload_ends_its_requests_and_frees_its_memory(page: Page, served: Served) -> None:
    load(page, "brief", "noise")
    fresh_chat(page, max_tokens=800, model=label("brief"))
    send(page, "Tell me a long story.")
    expect(answer(page).locator(".pw-markdown").last).to_contain_text(re.compile(r"\w+"))
    other = open_page(page.context, served.page)
    unload(other, "brief", first="end its requests")
    expect(note(other)).to_contain_text("Unloaded brief: 553.0 kB of host memory")
    expect(note(other)).to_contain_text("1 requests were ended")
    expect(row(other, "brief")).to_have_count(0)
    other.close()
    expect(page.locator("#conversation")).not_to_have_attribute("aria-busy", "true")
    take_pictures(page, "served-adapter-gone")
    page.get_by_role("tab", name="Adapters").click()
    expect(row(page, "brief")).to_have_count(0)


def test_two_tabs_that_change_one_adapter_agree_in_the_end(page: Page, served: Served) -> None:
    other = open_page(page.context, served.page)
    for each in (page, other):
        each.get_by_role("tab", name="Adapters").click()
        fill(each, "both", "pirate")
    page.locator("#load").click()
    other.locator("#load").click()
    outcomes = []
    for each in (page, other):
        # The later one, before or after the first had loaded it.
        expect(note(each)).to_contain_text(
            re.compile("Loaded both|both is loaded already|'both' is being loaded")
        )
        outcomes.append("Loaded" in note(each).inner_text())
        expect(row(each, "both")).to_have_count(1)
    assert any(outcomes)
    for each in (page, other):
        choose(each, "Adapter", "both")
    page.locator("#unload").click()
    other.locator("#unload").click()
    for each in (page, other):
        expect(note(each)).to_contain_text(
            re.compile("Unloaded both|No adapter 'both' is loaded|'both' is being unloaded already")
        )
        expect(row(each, "both")).to_have_count(0)
    other.close()
