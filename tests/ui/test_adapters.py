"""Adapters are chosen, compared, loaded and unloaded in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from pagewire.v1 import engine_pb2
from tests.ui.adapters_tab import fill, row
from tests.ui.browser import answer, choose, new_chat, page_at, send, take_pictures
from tests.ui.fake_adapters import FakeAdapters
from tests.ui.fake_inference import FakeInference

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture(scope="module")
def frontend(frontend_port: int, adapters: FakeAdapters) -> Iterator[FakeInference]:
    adapters.add("sql", device_bytes=1_250_000, num_running_requests=3)
    fake = FakeInference(adapters=adapters)
    fake.start(frontend_port)
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def opened(browser: Browser, page_url: str, frontend: FakeInference) -> Iterator[Page]:
    with page_at(browser, page_url) as page:
        yield page


@pytest.fixture
def tab(opened: Page) -> Page:
    opened.get_by_role("tab", name="Adapters").click()
    expect(opened.locator("#adapters-table")).to_contain_text("lineage")
    return opened


def test_the_table_tells_lineage_memory_and_requests(tab: Page) -> None:
    for told in ("fake-model → sql", "1.2 MB host, 1.2 MB device", "3 running", "in host memory",
                 "alpha 16", "down_proj, q_proj", "aaaaaaaaaa"):  # fmt: skip
        expect(row(tab, "sql")).to_contain_text(told)
    expect(tab.locator("#adapters-table")).to_contain_text("rank up to 16")


def test_a_load_shows_its_progress_and_then_the_adapter_can_be_chosen(
    tab: Page, adapters: FakeAdapters
) -> None:
    adapters.loading.clear()
    fill(tab, "poems", "poems")
    tab.locator("#load").click()
    expect(tab.locator("#adapters-note")).to_contain_text("Loading poems")
    expect(tab.locator('[data-adapter="poems"] [data-state="loading"]')).to_be_visible()
    adapters.loading.set()
    expect(tab.locator("#adapters-note")).to_contain_text("Loaded poems: rank 8, 1.2 MB.")
    take_pictures(tab, "adapters")
    tab.locator("#load").click()
    expect(tab.get_by_role("alert")).to_contain_text("poems is loaded already")
    tab.locator("#update").click()
    expect(tab.locator("#adapters-note")).to_contain_text("Updated poems")
    expect(row(tab, "poems")).to_contain_text("bbbbbbbbbb")
    assert adapters.requests[-1].in_place
    new_chat(tab)
    choose(tab, "Model", "poems (adapter of fake-model)")
    send(tab, "hello")
    expect(answer(tab)).to_contain_text("(poems)")
    expect(answer(tab).locator(".pw-figures")).to_contain_text("poems")


@pytest.mark.slow
def test_what_can_not_be_loaded_is_said(tab: Page) -> None:
    fill(tab, "lost", "missing")
    tab.locator("#load").click()
    expect(tab.get_by_role("alert")).to_contain_text("No folder 'missing' under --lora-dir")
    tab.get_by_label("Name", exact=True).fill(" ")
    tab.locator("#load").click()
    expect(tab.get_by_role("alert")).to_contain_text("a name and a folder")


def test_names_are_text_wherever_they_stand(tab: Page, adapters: FakeAdapters) -> None:
    adapters.add(HOSTILE, path=HOSTILE)
    expect(tab.locator("#adapters-table")).to_contain_text(HOSTILE)
    assert tab.locator("#adapters-table img").count() == 0
    adapters.drop(HOSTILE)


@pytest.mark.slow
def test_an_unload_waits_or_ends_requests(tab: Page, adapters: FakeAdapters) -> None:
    adapters.add("old")
    adapters.leaving.clear()
    tab.get_by_role("tab", name="Chat").click()
    tab.get_by_role("tab", name="Adapters").click()
    choose(tab, "Adapter", "old")
    tab.locator("#unload").click()
    expect(tab.locator("#adapters-note")).to_contain_text("Unloading old")
    expect(tab.locator('[data-adapter="old"] [data-state="leaving"]')).to_be_visible()
    adapters.leaving.set()
    expect(tab.locator("#adapters-note")).to_contain_text("1.2 MB of host memory came back")
    expect(tab.locator('[data-adapter="old"]')).to_have_count(0)
    request = adapters.requests[-1]
    assert (request.mode, request.timeout_s) == (engine_pb2.UnloadAdapterRequest.MODE_WAIT, 60)


def test_base_and_adapter_answer_one_question_side_by_side(
    opened: Page, frontend: FakeInference
) -> None:
    opened.get_by_role("tab", name="Compare").click()
    choose(opened, "Right", "sql (adapter of fake-model)")
    opened.get_by_label("Question").fill("which tables?")
    opened.locator("#compare-ask").click()
    left, right = opened.locator(".pw-side").first, opened.locator(".pw-side").last
    expect(left).to_contain_text("You said: which tables?")
    expect(right).to_contain_text("(sql)")
    expect(left).not_to_contain_text("(sql)")
    for side in (left, right):
        expect(side.locator(".pw-figures")).to_contain_text("tok/s")
    take_pictures(opened, "compare")
    opened.get_by_label("Question").fill("slow one")
    opened.locator("#compare-ask").click()
    expect(right).to_contain_text("word2")
    opened.locator("#compare-stop").click()
    expect(right.locator(".pw-figures")).to_contain_text("stopped by you")
    opened.get_by_label("Question").fill("fail please")
    opened.locator("#compare-ask").click()
    expect(left).to_contain_text("The server is busy")


@pytest.mark.slow
def test_where_adapters_are_off_the_page_names_the_flag(
    opened: Page, adapters: FakeAdapters
) -> None:
    adapters.allowed = False
    opened.get_by_role("tab", name="Adapters").click()
    table = opened.locator("#adapters-table")
    expect(table).to_contain_text("--allow-runtime-lora-updating")
    expect(table).to_contain_text("fake-model → sql")
    take_pictures(opened, "adapters-off")
    adapters.allowed = True
