"""Chat templates and tokens of the served model, and of an adapter that ships its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.serve_process import MODEL
from tests.ui.browser import answer, choose, send, take_pictures, write_template
from tests.ui.served.test_adapters import label, load, note, unload
from tests.ui.served.visitor import fresh_chat

pytestmark = pytest.mark.slow


@pytest.fixture
def editor(page: Page) -> Page:
    page.get_by_role("tab", name="Templates").click()
    choose(page, "Template", "Model: default")
    page.locator("#restore-template").click()
    expect(page.locator("#prompt-count")).to_contain_text("51 tokens, 9 of them control tokens")
    return page


@pytest.fixture
def own_text(page: Page) -> Iterator[str]:
    load(page, "own-text", "own-text")
    yield "own-text"
    choose(page, "Model", MODEL)
    unload(page, "own-text")
    expect(note(page)).to_contain_text("Unloaded own-text")


def test_the_list_has_the_models_own_and_built_in_ones(editor: Page) -> None:
    editor.get_by_label("Template", exact=True).click()
    names = [name.strip("✓ \n") for name in editor.get_by_role("option").all_inner_texts()]
    assert names[0] == "Model: default"
    assert {"Built-in: ChatML", "Built-in: Llama 3", "Built-in: Mistral"} <= set(names)
    editor.keyboard.press("Escape")


def test_the_preview_follows_the_editor_with_its_control_tokens(editor: Page) -> None:
    preview = editor.locator("#prompt-preview")
    control = preview.locator(".pw-token.control")
    expect(control).to_have_count(9)
    expect(control.first).to_have_text("<|im_start|>")
    assert control.first.evaluate("n => getComputedStyle(n).backgroundColor") == "rgb(185, 28, 28)"
    expect(preview).to_contain_text("What is a page table?")
    # Highlighted: pieces of more than one colour.
    colours = editor.locator("#template-editor .cm-line span").evaluate_all(
        "nodes => new Set(nodes.map((node) => getComputedStyle(node).color)).size"
    )
    assert colours > 2
    take_pictures(editor, "served-templates")
    write_template(editor, "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    expect(editor.locator("#prompt-count")).to_contain_text("4 of them control tokens")


def test_a_fault_is_shown_at_line_and_column(editor: Page) -> None:
    write_template(editor, "{% for m in messages %}\n{{ m.content }}\n  {% endif %}")
    problem = editor.locator("#template-problem")
    expect(problem).to_contain_text("Line 3, column 6")
    assert problem.locator("pre").inner_text().splitlines()[0] == "3 |   {% endif %}"
    take_pictures(editor, "served-template-fault")


def test_a_template_without_an_end_is_cut_off(editor: Page) -> None:
    write_template(
        editor, "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    )
    expect(editor.locator("#template-problem").get_by_role("alert")).to_be_visible()
    editor.locator("#restore-template").click()
    expect(editor.locator("#prompt-count")).to_contain_text("51 tokens")


def test_the_difference_is_shown_and_the_own_restored(editor: Page) -> None:
    source = editor.locator("#template-editor .cm-content").inner_text()
    write_template(editor, source.replace("helpful AI assistant", "gruff captain"))
    editor.get_by_text("Difference from the model's own").click()
    expect(editor.locator("#template-diff ins")).to_contain_text("gruff captain")
    expect(editor.locator("#template-diff del")).to_contain_text("helpful AI assistant")
    take_pictures(editor, "served-template-difference")
    editor.locator("#restore-template").click()
    expect(editor.locator("#template-diff")).to_contain_text("It is the model's own template")
    editor.get_by_text("Difference from the model's own").click()


def test_templates_are_saved_exported_and_imported(editor: Page, tmp_path: Path) -> None:
    write_template(editor, "{{ messages[-1].content }}")
    editor.locator("#template-name input, #template-name textarea").fill("bare")
    editor.locator("#save-template").click()
    expect(editor.locator("#template-note")).to_contain_text("Saved in this browser")
    with editor.expect_download() as download:
        editor.locator("#export-template").click()
    download.value.save_as(tmp_path / "bare.jinja")
    assert (tmp_path / "bare.jinja").read_text() == "{{ messages[-1].content }}"
    with editor.expect_file_chooser() as chooser:
        editor.locator("#import-template").click()
    chooser.value.set_files(
        {"name": "shout.jinja", "mimeType": "text/plain", "buffer": b"{{ messages[0].role }}!"}
    )
    expect(editor.locator("#template-note")).to_contain_text("Imported shout.jinja")
    expect(editor.locator("#prompt-preview")).to_contain_text("system!")
    choose(editor, "Template", "Saved: bare")
    expect(editor.locator("#prompt-preview")).to_contain_text("And paged attention?")


def test_a_template_is_used_for_this_chat(editor: Page) -> None:
    fresh_chat(editor)
    editor.get_by_role("tab", name="Templates").click()
    choose(editor, "Template", "Model: default")
    write_template(
        editor,
        "<|im_start|>user\nWhat is the capital of Germany?<|im_end|>\n<|im_start|>assistant\n",
    )
    expect(editor.locator("#prompt-count")).to_contain_text("3 of them control tokens")
    editor.locator("#use-template").click()
    chip = editor.locator(".pw-template .pw-chip")
    expect(chip).to_contain_text("Chat template: default (edited)")
    send(editor, "What is the capital of France?")
    expect(answer(editor)).to_contain_text("Berlin")
    take_pictures(editor, "served-own-template")
    editor.get_by_role("button", name="Use the model's own template again").click()
    send(editor, "What is the capital of France?")
    expect(editor.locator(".bot.message")).to_have_count(2)
    expect(answer(editor)).to_contain_text("Paris")


def test_the_prompt_of_this_chat_is_shown(editor: Page) -> None:
    fresh_chat(editor)
    editor.locator("#system-prompt textarea").fill("Be brief.")
    send(editor, "What is the capital of France?")
    expect(answer(editor).locator(".pw-actions")).to_be_visible()
    editor.get_by_role("tab", name="Templates").click()
    editor.get_by_label("This chat").check()
    shown = editor.locator("#prompt-preview .pw-tokens")
    expect(shown).to_contain_text("What is the capital of France?")
    expect(shown).to_contain_text("brief")
    expect(shown).not_to_contain_text("page table")
    editor.get_by_label("An example").check()
    editor.locator("#system-prompt textarea").fill("")


def test_an_adapter_brings_its_own_template_and_tokenizer(page: Page, own_text: str) -> None:
    fresh_chat(page, model=label(own_text), max_tokens=8)
    page.get_by_role("tab", name="Templates").click()
    choose(page, "Template", "Model: default")
    page.locator("#restore-template").click()
    content = page.locator("#template-editor .cm-content")
    expect(content).to_contain_text("Captain's own template")
    # Its tokenizer knows small letters only.
    expect(page.locator("#prompt-preview")).to_contain_text("captain's own template")
    take_pictures(page, "served-adapter-template")
    page.get_by_role("tab", name="Tokenizer").click()
    page.get_by_label("Text", exact=True).fill("PARIS in July")
    tokens = page.locator("#tokenizer-tokens")
    expect(tokens).to_contain_text("paris in july")
    # And the answer is made with both: as many tokens as the template has, and not the model's.
    page.get_by_role("tab", name="Chat").click()
    send(page, "HELLO")
    figures = answer(page).locator(".pw-figures")
    expect(figures).to_contain_text("prompt 19 tokens")
    page.get_by_role("tab", name="Templates").click()
    page.get_by_label("This chat").check()
    expect(page.locator("#prompt-count")).to_contain_text("19 tokens")
    page.get_by_label("An example").check()
    choose(page, "Model", MODEL)
    page.get_by_role("tab", name="Tokenizer").click()
    expect(tokens).to_contain_text("PARIS in July")


def test_a_text_is_shown_as_coloured_tokens_with_ids(page: Page) -> None:
    page.get_by_role("tab", name="Tokenizer").click()
    page.get_by_label("Text", exact=True).fill("<|im_start|>Paris! 你好 👋")
    tokens = page.locator("#tokenizer-tokens .pw-token")
    expect(page.locator("#token-count")).to_contain_text(re.compile(r"\d+ tokens"))
    expect(tokens.first).to_have_class(re.compile("control"))
    tokens.nth(1).hover()
    expect(page.locator("#tokenizer-tokens .pw-token-card")).to_contain_text("id 38634")
    take_pictures(page, "served-tokenizer")
    page.get_by_label("Read control tokens in the text").click()
    expect(tokens.first).not_to_have_class(re.compile("control"))
    page.get_by_label("Read control tokens in the text").click()
