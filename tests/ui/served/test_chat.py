"""Chatting with the served model: answers stream, stop, are retried, edited, copied and kept."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.serve_process import Served
from tests.ui.browser import answer, choose, send, take_pictures, write_template
from tests.ui.served.visitor import fresh_chat, open_page

pytestmark = pytest.mark.slow

STORY = "Write a long story about a dragon who counts blocks."
# Shows the model how to reason; the closing tag tells the server that it will.
THINKER = """<|im_start|>user
What is 2+2?<|im_end|>
<|im_start|>assistant
<think>
The user asks for a sum. 2 + 2 = 4. I will answer.
</think>
The answer is 4.<|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def ended(page: Page) -> None:
    """Waits until the last answer is whole."""
    expect(answer(page).locator(".pw-actions")).to_be_visible()


def said(page: Page) -> str:
    """The last answer's text."""
    ended(page)
    return answer(page).locator(".pw-markdown").last.inner_text()


def running(served: Served) -> float:
    """Requests that the engine computes, as its metrics tell."""
    text = urllib.request.urlopen(served.http + "/metrics", timeout=20).read().decode()
    found = re.findall(r"^pagewire_num_requests_running(?:\{[^}]*\})? (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


def test_an_answer_streams_and_stops_when_told(page: Page, served: Served) -> None:
    fresh_chat(page, max_tokens=700)
    send(page, STORY)
    drawn = answer(page).locator(".pw-markdown").last
    expect(drawn).to_contain_text(re.compile(r"\w+ \w+"))
    first = drawn.inner_text()
    expect(drawn).not_to_have_text(first)
    expect(answer(page)).to_have_class(re.compile("streaming"))
    expect(page.locator("#conversation")).to_have_attribute("aria-busy", "true")
    take_pictures(page, "served-streaming")
    page.get_by_role("button", name="Stop").click()
    figures = answer(page).locator(".pw-figures")
    expect(figures).to_contain_text("stopped by you")
    expect(figures).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tok/s · first token after"))
    assert drawn.inner_text().startswith(first[:20])
    deadline = time.monotonic() + 30
    while running(served) and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert running(served) == 0


def test_figures_tell_tokens_rate_and_time_to_the_first(page: Page) -> None:
    fresh_chat(page)
    send(page, "What is the capital of France?")
    assert "Paris" in said(page)
    expect(answer(page).locator(".pw-figures")).to_have_text(
        re.compile(r"8 tokens · [\d.]+ tok/s · first token after [\d.]+ s · prompt 37 tokens.*")
    )  # fmt: skip


def test_questions_and_answers_are_retried_edited_undone_and_copied(page: Page) -> None:
    fresh_chat(page)
    send(page, "What is the capital of France?")
    first = said(page)
    answer(page).get_by_role("button", name="Ask again").click()
    assert said(page) == first  # temperature 0
    question = page.locator(".user.message").first
    question.hover()
    question.get_by_role("button", name="Edit message").click()
    question.get_by_label("Edit text").fill("What is the capital of Germany?")
    question.get_by_role("button", name="Ask again").click()
    assert "Berlin" in said(page)
    answer(page).get_by_role("button", name="Edit answer").click()
    answer(page).get_by_label("Edit text").fill("The capital of Germany is **Bonn**.")
    answer(page).get_by_role("button", name="Keep").click()
    expect(answer(page).locator("strong")).to_have_text("Bonn")
    send(page, "Which city did you just name?")
    ended(page)
    page.get_by_role("tab", name="Templates").click()
    page.get_by_label("This chat").check()
    expect(page.locator("#prompt-preview")).to_contain_text("Bonn")
    page.get_by_label("An example").check()
    page.get_by_role("tab", name="Chat").click()
    answer(page).get_by_role("button", name="Undo").click()
    expect(page.locator("#message textarea")).to_have_value("Which city did you just name?")
    expect(page.locator(".message")).to_have_count(2)
    answer(page).get_by_role("button", name="Copy answer").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "The capital of Germany is **Bonn**."
    page.locator("#message textarea").fill("")


def test_markdown_and_code_are_drawn(page: Page) -> None:
    fresh_chat(page, max_tokens=120)
    send(page, "Write a Python function that adds two numbers.")
    ended(page)
    code = answer(page).locator(".pw-code").first
    expect(code.locator(".pw-code-keyword").first).to_have_text("def")
    code.get_by_role("button", name="Copy code").click()
    assert "return" in page.evaluate("navigator.clipboard.readText()")
    take_pictures(page, "served-code")


def test_reasoning_is_folded_apart(page: Page) -> None:
    fresh_chat(page, max_tokens=60)
    page.get_by_role("tab", name="Templates").click()
    expect(page.locator("#prompt-count")).to_contain_text("tokens")
    write_template(page, THINKER)
    expect(page.locator("#prompt-preview")).to_contain_text("for")
    page.locator("#use-template").click()
    expect(page.locator(".pw-template .pw-chip")).to_contain_text("Chat template:")
    send(page, "What is 3+3?")
    assert said(page) == "The answer is 6."
    folded = answer(page).locator("details")
    expect(folded).not_to_have_attribute("open", re.compile(""))
    expect(folded.locator(".pw-markdown")).not_to_be_visible()
    folded.locator("summary").click()
    expect(folded.locator(".pw-markdown")).to_contain_text("3 + 3 = 6")
    take_pictures(page, "served-reasoning")
    page.get_by_role("button", name="Use the model's own template again").click()


def test_a_system_prompt_goes_before_the_chat(page: Page) -> None:
    fresh_chat(page)
    page.locator("#system-prompt textarea").fill("Your name is Captain Block.")
    send(page, "What is your name?")
    assert "Captain Block" in said(page)
    page.locator("#system-prompt textarea").fill("")
    answer(page).get_by_role("button", name="Ask again").click()
    expect(answer(page)).not_to_contain_text("Captain Block")
    ended(page)


def test_sampling_has_presets_ranges_and_a_seed(page: Page) -> None:
    fresh_chat(page, max_tokens=12)
    choose(page, "Sampling", "Creative")
    for name, least, most, value in (("temperature", "0", "2", "1.1"), ("top-p", "0.05", "1", "1")):
        slider = page.locator(f"#{name} input[type=range]")
        assert (slider.get_attribute("min"), slider.get_attribute("max")) == (least, most)
        expect(slider).to_have_value(value)
    answers = []
    for seed in ("7", "7", "8"):
        page.locator("#seed textarea").fill(seed)
        send(page, "Tell me a story.")
        answers.append(said(page))
        expect(answer(page).locator(".pw-figures")).to_contain_text("12 tokens")
        answer(page).get_by_role("button", name="Undo").click()
        page.locator("#message textarea").fill("")
    assert answers[0] == answers[1] != answers[2]
    expect(page.locator("#message .submit-button")).to_be_visible()
    page.locator("#seed textarea").fill("")
    page.get_by_text("More sampling").click()
    page.get_by_label("Stop strings").fill("Paris")
    choose(page, "Sampling", "Precise")
    send(page, "What is the capital of France?")
    assert said(page).strip() == "The capital of France is"
    page.get_by_label("Stop strings").fill("")
    page.get_by_text("More sampling").click()


def test_what_goes_wrong_is_said_in_words(page: Page) -> None:
    fresh_chat(page, max_tokens=24)
    page.locator("#max-tokens textarea").fill("many")
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("Max tokens must be a whole number")
    page.locator("#max-tokens textarea").fill("24")
    send(page, "block " * 2000)
    expect(page.get_by_role("alert")).to_contain_text("1024")
    take_pictures(page, "served-error")
    expect(page.locator("#message textarea")).not_to_have_value("")
    page.locator("#message textarea").fill("")


def test_tokens_tell_what_else_they_might_have_been(page: Page) -> None:
    fresh_chat(page)
    send(page, "What is the capital of France?")
    ended(page)
    answer(page).get_by_role("button", name="Tokens").click()
    token = answer(page).locator(".pw-token", has_text="Paris").first
    card = answer(page).locator(".pw-token-card")
    token.hover()
    expect(card.locator("tbody tr")).to_have_count(5)
    expect(card.locator("tr.chosen")).to_contain_text("Paris")
    expect(card.locator("tr.chosen")).to_contain_text(re.compile(r"9\d\.\d %"))
    token.click()
    page.locator("#message textarea").hover()
    expect(card).to_be_visible()
    take_pictures(page, "served-chat")


def test_two_tabs_answer_at_once(page: Page, served: Served) -> None:
    fresh_chat(page, max_tokens=300)
    other = open_page(page.context, served.page)
    send(page, STORY)
    expect(answer(page).locator(".pw-markdown").last).to_contain_text(re.compile(r"\w+ \w+"))
    send(other, "What is the capital of France?")
    assert "Paris" in said(other)
    expect(page.locator("#message .stop-button")).to_be_visible()
    expect(page.locator("#conversation")).not_to_contain_text("France")
    expect(other.locator("#conversation")).not_to_contain_text("dragon")
    page.locator("#message textarea").press("Escape")
    expect(page.locator("#status")).to_contain_text("stopped by you")
    other.close()


def test_conversations_outlive_a_reload_and_travel_as_json(page: Page, tmp_path: Path) -> None:
    fresh_chat(page)
    send(page, "What is the capital of Spain?")
    kept = said(page)
    page.reload()
    expect(answer(page)).to_contain_text(kept)
    with page.expect_download() as download:
        page.locator("#export-conversations").click()
    download.value.save_as(tmp_path / "out.json")
    exported = json.loads((tmp_path / "out.json").read_text())
    assert kept in [m["text"].strip() for c in exported["conversations"] for m in c["messages"]]
    listed = page.locator(".pw-conversations li")
    before = listed.count()
    for content, told in (
        ((tmp_path / "out.json").read_text(), f"Imported {before} conversations"),
        ('{"format": "pagewire.conversations", "vers', "not JSON"),
    ):
        with page.expect_file_chooser() as chooser:
            page.locator("#import-conversations").click()
        chooser.value.set_files(
            {"name": "c.json", "mimeType": "application/json", "buffer": content.encode()}
        )
        expect(page.locator("#conversations .pw-note")).to_contain_text(told)
    expect(listed).to_have_count(2 * before)


def test_files_the_model_can_not_read_are_refused(page: Page) -> None:
    fresh_chat(page)
    files = page.get_by_label("Files to attach")
    files.set_input_files({"name": "cat.png", "mimeType": "image/png", "buffer": b"\x89PNG"})
    refused = page.locator("#status").get_by_role("alert")
    expect(refused).to_contain_text("this model reads text only")
    take_pictures(page, "served-refused-file")
    note = {"name": "note.txt", "mimeType": "text/plain", "buffer": b"The code word is heron."}
    files.set_input_files(note)
    expect(page.locator("#message .pw-chip")).to_contain_text("note.txt")
    send(page, "What is the code word?")
    assert "heron" in said(page).lower()
