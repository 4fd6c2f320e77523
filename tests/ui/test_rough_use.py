"""People click fast, write in all scripts, paste whole books and reload in the middle of things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.ui.browser import answer, page_at, send
from tests.ui.fake_inference import FakeInference
from tests.ui.late_answers import late_questions

pytestmark = pytest.mark.slow

# Which side of its element a text stands at.
_SIDE = """(node) => {
  const range = document.createRange();
  range.selectNodeContents(node);
  const [text, box] = [range.getBoundingClientRect(), node.getBoundingClientRect()];
  return text.left - box.left > box.right - text.right ? "right" : "left";
}"""


@pytest.fixture
def chat(browser: Browser, page_url: str, frontend: FakeInference) -> Iterator[Page]:
    with page_at(browser, page_url) as page:
        yield page


def ended(page: Page) -> None:
    """Waits until no answer is on its way."""
    expect(page.locator("#conversation")).not_to_have_attribute("aria-busy", "true")


def test_who_types_before_the_chat_is_there_is_not_led_away(
    browser: Browser, page_url: str, frontend: FakeInference
) -> None:
    page = browser.new_page()
    held: list[Route] = []
    page.route("**/chat.js", lambda route: held.append(route))
    with page.expect_request("**/chat.js"):
        page.goto(page_url)
    prompt = page.locator("#system-prompt textarea")
    prompt.press_sequentially("Be ")
    (script,) = held
    script.continue_()
    expect(page.locator("#conversation .placeholder")).to_be_visible()
    page.keyboard.type("brief.")
    expect(prompt).to_have_value("Be brief.")
    expect(page.locator("#message textarea")).to_have_value("")
    page.close()


def test_a_refusal_leads_nobody_away_who_types_elsewhere(
    chat: Page, frontend: FakeInference
) -> None:
    box, prompt = chat.locator("#message textarea"), chat.locator("#system-prompt textarea")
    for elsewhere in (True, False):
        with late_questions(chat) as held:
            send(chat, "fail now")
            held.wait_for(1)
            if elsewhere:
                prompt.press_sequentially("Be ")
        expect(box).to_have_value("fail now")
        chat.keyboard.type("brief.")
        expect(prompt).to_have_value("Be brief.")
    # Who waited for the answer goes on with the question.
    expect(box).to_have_value("fail nowbrief.")


def test_a_question_that_is_being_changed_stays_so_when_an_answer_ends(
    chat: Page, frontend: FakeInference
) -> None:
    send(chat, "slow one")
    expect(answer(chat)).to_contain_text("word1")
    question = chat.locator(".user.message").first
    question.hover()
    question.get_by_role("button", name="Edit message").click()
    edit = chat.get_by_label("Edit text")
    edit.fill("quick ")
    # Not asked while an answer is on its way.
    chat.keyboard.press("Control+Enter")
    chat.locator("#message button.stop-button").click()
    ended(chat)
    expect(answer(chat).locator(".pw-actions")).to_be_visible()
    edit.press_sequentially("one")
    chat.keyboard.press("Control+Enter")
    expect(answer(chat)).to_contain_text("You said: quick one")


def test_stop_counts_also_where_it_overtakes_the_question(
    chat: Page, frontend: FakeInference
) -> None:
    with late_questions(chat) as held:
        send(chat, "slow please")
        held.wait_for(1)
        with chat.expect_response("**/gradio_api/run/**"):
            chat.locator("#message button.stop-button").click()
    ended(chat)
    expect(chat.locator("#status")).to_contain_text("Stopped by you")
    # The model is not asked at all, or not for the minute that the answer would take.
    assert frontend.stops_answering("slow please", 20)


def test_a_question_sent_many_times_at_once_is_asked_once(
    chat: Page, frontend: FakeInference
) -> None:
    chat.locator("#message textarea").fill("slow once")
    chat.evaluate(
        """() => {
          const form = document.querySelector("#message");
          for (let time = 0; time < 5; time += 1) form.requestSubmit();
        }"""
    )
    expect(answer(chat)).to_contain_text("word1")
    chat.evaluate(
        """() => {
          for (let time = 0; time < 5; time += 1) document.querySelector(".stop-button").click();
        }"""
    )
    ended(chat)
    assert frontend.times_asked("slow once") == 1
    expect(chat.locator(".message")).to_have_count(2)
    # And so is a retry.
    chat.evaluate(
        """() => {
          const retry = document.querySelector("[aria-label^='Ask again']");
          for (let time = 0; time < 5; time += 1) retry.click();
        }"""
    )
    expect(answer(chat)).to_contain_text("word1")
    chat.locator("#message button.stop-button").click()
    ended(chat)
    assert frontend.times_asked("slow once") == 2
    expect(chat.locator(".message")).to_have_count(2)


def test_every_script_goes_its_own_way_and_arrives_whole(
    chat: Page, frontend: FakeInference
) -> None:
    text = "مرحبا بالعالم 👩‍👩‍👧‍👦\n\nand left to right 🇩🇪 e\u0301"
    send(chat, f"write {text}")
    ended(chat)
    assert frontend.requests[-1].messages[-1].content[0].text == f"write {text}"
    paragraphs: Locator = answer(chat).locator(".pw-markdown p")
    assert paragraphs.all_inner_texts() == text.split("\n\n")
    assert [each.evaluate(_SIDE) for each in paragraphs.all()] == ["right", "left"]
    send(chat, "שלום")
    ended(chat)
    kept = chat.evaluate(
        "[...document.querySelectorAll('.user .pw-text')].map((node) => node.textContent)"
    )
    assert kept == [f"write {text}", "שלום"]


def test_a_whole_book_is_pasted_and_sent(chat: Page, frontend: FakeInference) -> None:
    book = "x " + "page " * 60_000
    chat.locator("#message textarea").fill(book)
    chat.locator("#message textarea").press("Enter")
    expect(answer(chat).locator(".pw-figures")).to_contain_text("tokens", timeout=60_000)
    assert frontend.requests[-1].messages[-1].content[0].text == book
    chat.locator("#message button.stop-button").click()
    ended(chat)


def test_a_reload_in_the_middle_keeps_what_came_and_what_is_being_written(
    chat: Page, frontend: FakeInference
) -> None:
    send(chat, "slow please")
    expect(answer(chat)).to_contain_text("word2")
    chat.locator("#message textarea").fill("half wri")
    chat.reload()
    assert frontend.stops_answering("slow please")
    expect(answer(chat)).to_contain_text("word2")
    expect(answer(chat)).to_contain_text("the page was left before it ended")
    box = chat.locator("#message textarea")
    expect(box).to_have_value("half wri")
    expect(chat.locator("#head")).to_contain_text("fake-model")
    box.fill("half written")
    box.press("Enter")
    expect(answer(chat)).to_contain_text("You said: half written")
    chat.reload()
    expect(answer(chat)).to_contain_text("You said: half written")
    expect(box).to_have_value("")


def test_another_question_to_compare_ends_the_answers_to_the_one_before(
    chat: Page, frontend: FakeInference
) -> None:
    chat.get_by_role("tab", name="Compare").click()
    left = chat.locator(".pw-side").first
    question, ask = chat.get_by_label("Question"), chat.locator("#compare-ask")
    question.fill("slow one")
    ask.click()
    expect(left).to_contain_text("word1")
    question.fill("another")
    ask.click()
    expect(left).to_contain_text("You said: another")
    expect(left.locator(".pw-actions")).to_be_visible()
    assert frontend.stops_answering("slow one")
    expect(left).to_contain_text("You said: another")
