"""On a slow link people are faster than the server: the settings that they chose last are asked
with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from pagewire.v1 import inference_pb2
from tests.ui.browser import answer, choose, new_chat, page_at, send
from tests.ui.fake_adapters import FakeAdapters
from tests.ui.fake_inference import FakeInference
from tests.ui.late_answers import late_answers

pytestmark = pytest.mark.slow

# Types in the same turn of the browser's loop as the click that shows the box.
_CLICK_AND_TYPE = """([opener, box, text]) => {
  opener.click();
  const area = document.querySelector(box);
  Object.getOwnPropertyDescriptor(Object.getPrototypeOf(area), "value").set.call(area, text);
  area.dispatchEvent(new Event("input", { bubbles: true }));
}"""


@pytest.fixture(scope="module")
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture(scope="module")
def frontend(frontend_port: int, adapters: FakeAdapters) -> Iterator[FakeInference]:
    adapters.add("sql")
    adapters.add("poems")
    fake = FakeInference(adapters=adapters)
    fake.start(frontend_port)
    yield fake
    fake.stop()


@pytest.fixture
def chat(browser: Browser, page_url: str, frontend: FakeInference) -> Iterator[Page]:
    with page_at(browser, page_url) as page:
        yield page


def asked(chat: Page, frontend: FakeInference, text: str = "hello") -> inference_pb2.ChatRequest:
    """What the frontend is asked when this is sent."""
    send(chat, text)
    expect(answer(chat)).to_contain_text(f"You said: {text}")
    expect(answer(chat).locator(".pw-actions")).to_be_visible()
    return frontend.requests[-1]


def test_the_last_preset_is_asked_with(chat: Page, frontend: FakeInference) -> None:
    with late_answers(chat):
        choose(chat, "Sampling", "Precise")
        choose(chat, "Sampling", "Creative")
        request = asked(chat, frontend)
    assert round(request.sampling_params.temperature, 3) == 1.1
    assert round(request.sampling_params.presence_penalty, 3) == 0.3


def test_what_is_typed_as_its_box_opens_is_asked_with(chat: Page, frontend: FakeInference) -> None:
    expect(chat.locator("#stop-strings textarea")).to_have_count(1)
    opener = chat.get_by_text("More sampling").element_handle()
    chat.evaluate(_CLICK_AND_TYPE, [opener, "#stop-strings textarea", "END\nFIN"])
    expect(chat.get_by_label("Stop strings")).to_be_visible()
    request = asked(chat, frontend)
    assert list(request.text_params.stop) == ["END", "FIN"]


def test_what_is_typed_as_its_tab_opens_stays(chat: Page) -> None:
    boxes = {
        "Compare": "#compare-question textarea",
        "Adapters": "#adapter-name textarea",
        "Tokenizer": "#tokenizer-text textarea",
    }
    for tab, box in boxes.items():
        expect(chat.locator(box)).to_have_count(1)
        opener = chat.get_by_role("tab", name=tab).element_handle()
        chat.evaluate(_CLICK_AND_TYPE, [opener, box, f"typed in {tab}"])
    for tab, box in boxes.items():
        chat.get_by_role("tab", name=tab).click()
        expect(chat.locator(box)).to_be_visible()
        expect(chat.locator(box)).to_have_value(f"typed in {tab}")


def test_a_conversation_is_asked_on_with_its_own_settings_at_once(
    chat: Page, frontend: FakeInference
) -> None:
    for seed in ("1", "2"):
        new_chat(chat)
        chat.locator("#seed textarea").fill(seed)
        asked(chat, frontend, f"chat {seed}")
    listed = chat.locator(".pw-conversations")
    with late_answers(chat):
        listed.get_by_text("chat 1").click()
        listed.get_by_text("chat 2").click()
        listed.get_by_text("chat 1").click()
        request = asked(chat, frontend, "more")
    assert request.messages[0].content[0].text == "chat 1"
    assert request.sampling_params.seed == 1


def test_a_model_stays_chosen_whatever_list_of_them_comes_late(
    chat: Page, frontend: FakeInference, adapters: FakeAdapters
) -> None:
    with late_answers(chat) as held:
        chat.get_by_role("tab", name="Compare").click()
        held.wait_for(1)
        choose(chat, "Right", "sql (adapter of fake-model)")
        choose(chat, "Model", "poems (adapter of fake-model)")
        adapters.add("later")  # so that the lists are drawn anew
        held.let_go()
    chat.get_by_role("tab", name="Chat").click()
    chat.get_by_role("tab", name="Compare").click()
    expect_offered(chat, "Left", "later (adapter of fake-model)")
    expect(chat.get_by_label("Right", exact=True)).to_have_value("sql (adapter of fake-model)")
    expect(chat.get_by_label("Model", exact=True)).to_have_value("poems (adapter of fake-model)")
    adapters.drop("poems")
    chat.get_by_role("tab", name="Chat").click()
    chat.get_by_role("tab", name="Compare").click()
    # One that is gone is not asked for.
    expect(chat.get_by_label("Model", exact=True)).to_have_value("fake-model")
    adapters.drop("later")
    adapters.add("poems")


def expect_offered(page: Page, label: str, option: str) -> None:
    """Waits until a list has an option."""
    box = page.get_by_label(label, exact=True)
    box.click()
    offered = page.locator(f'[id="{box.get_attribute("aria-controls")}"]')
    expect(offered.get_by_role("option", name=option, exact=True)).to_be_visible()
    page.keyboard.press("Escape")
