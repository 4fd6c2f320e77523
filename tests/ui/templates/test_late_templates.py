"""On a slow link people are faster than the server: the last thing that they did to a template or a
text is what counts."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.fakes.fake_engine_client import FakeEngineClient, byte_tokenizer
from tests.ui.browser import answer, choose, new_chat, send, write_template
from tests.ui.late_answers import late_answers

pytestmark = pytest.mark.slow


def test_what_is_written_stays_when_answers_to_what_was_done_before_come(editor: Page) -> None:
    editor.get_by_role("tab", name="Chat").click()
    content = editor.locator("#template-editor .cm-content")
    with late_answers(editor) as held:
        editor.get_by_role("tab", name="Templates").click()
        choose(editor, "Template", "Built-in: Plain transcript")
        editor.locator("#restore-template").click()
        expect(content).to_contain_text("capitalize")
        write_template(editor, "mine")
        held.wait_for(1)
        held.let_go(last_first=True)
    expect(editor.locator("#prompt-count")).to_contain_text("4 tokens, 0 of them")
    expect(content).to_have_text("mine")


def test_the_preview_is_that_of_the_last_question_in_whatever_order_answers_come(
    editor: Page,
) -> None:
    editor.get_by_role("tab", name="Chat").click()
    with late_answers(editor) as held:
        editor.get_by_role("tab", name="Templates").click()
        held.wait_for(1)
        editor.get_by_label("This chat").check()
        held.wait_for(2)
        held.let_go(last_first=True)
    expect(editor.locator("#prompt-preview .pw-token.control")).to_have_count(3)
    editor.get_by_label("An example").check()


def test_the_template_as_it_is_when_the_button_is_pressed_is_used(
    editor: Page, engine: FakeEngineClient
) -> None:
    new_chat(editor)
    editor.get_by_role("tab", name="Templates").click()
    with late_answers(editor):
        write_template(editor, "at once: {{ messages[-1].content }}")
        editor.locator("#use-template").click()
        expect(editor.locator(".pw-template .pw-chip")).to_contain_text("(edited)")
        send(editor, "hi")
        expect(answer(editor)).to_contain_text("Hello, world!")
    prompt = byte_tokenizer().decode(engine.requests[-1].prompt_token_ids)
    assert prompt == "at once: hi"
    editor.get_by_role("button", name="Use the model's own template again").click()


def test_templates_that_are_saved_fast_are_all_kept(editor: Page) -> None:
    name = editor.locator("#template-name input, #template-name textarea")
    with late_answers(editor):
        for each in ("one", "two"):
            write_template(editor, each)
            name.fill(each)
            editor.locator("#save-template").click()
    for each in ("one", "two"):
        choose(editor, "Template", f"Saved: {each}")
        expect(editor.locator("#template-editor .cm-content")).to_have_text(each)
        editor.locator("#delete-template").click()


def test_the_tokens_are_those_of_the_last_text(opened: Page) -> None:
    opened.get_by_role("tab", name="Tokenizer").click()
    text, count = opened.get_by_label("Text", exact=True), opened.locator("#token-count")
    text.fill("abc")
    expect(count).to_contain_text("3 tokens")
    opened.get_by_role("tab", name="Chat").click()
    with late_answers(opened) as held:
        opened.get_by_role("tab", name="Tokenizer").click()
        held.wait_for(1)
        text.fill("abcde")
        opened.get_by_label("Read control tokens in the text").click()
        held.let_go(last_first=True)
        held.wait_for(1)
        held.let_go()
    expect(count).to_contain_text("5 tokens")
    opened.get_by_label("Read control tokens in the text").click()
