"""Templates are written, and texts tokenised, in a real browser before the frontend itself."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.fakes.fake_engine_client import CHATML, FakeEngineClient, byte_tokenizer
from tests.ui.browser import answer, choose, new_chat, send, take_pictures, write_template


def prompt_of(engine: FakeEngineClient) -> str:
    """The prompt of the last request."""
    return str(
        byte_tokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    )


def test_the_preview_is_the_exact_prompt_with_its_control_tokens(editor: Page) -> None:
    preview = editor.locator("#prompt-preview")
    expect(preview.locator(".pw-token.control")).to_have_count(9)
    expect(editor.locator("#prompt-count")).to_contain_text("161 tokens")
    choose(editor, "Template", "Built-in: Plain transcript")
    expect(preview.locator(".pw-token.control")).to_have_count(0)
    shown = preview.locator(".pw-token").all_inner_texts()
    assert (
        "".join(shown)
        .replace("⏎", "\n")
        .replace("·", " ")
        .startswith("System: You are a helpful assistant.\nUser: What is a page table?")
    )
    write_template(editor, "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% endfor %}")
    expect(editor.locator("#prompt-count")).to_contain_text("1 of them control tokens")
    take_pictures(editor, "templates")


def test_the_editor_is_as_tall_as_its_text_needs(editor: Page) -> None:
    box = editor.locator("#template-editor .cm-editor")
    # A line that is wrapped is no reason to make room for many like it.
    write_template(editor, "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}" * 5)
    expect(editor.locator("#template-problem")).to_be_empty()
    short = box.evaluate("node => node.clientHeight")
    assert short < 250
    write_template(editor, "line\n" * 100)
    expect(editor.locator("#prompt-count")).to_contain_text("499 tokens")
    assert short < box.evaluate("node => node.clientHeight") <= 0.6 * 900 + 10


def test_a_fault_is_shown_at_its_line_and_column(editor: Page) -> None:
    write_template(editor, "{{ bos_token }}\n  {% if %}")
    problem = editor.locator("#template-problem")
    expect(problem).to_contain_text("Line 2, column 9")
    assert problem.locator("pre").inner_text().splitlines() == [
        "2 |   {% if %}",
        "            ^",
    ]
    write_template(editor, "{{ raise_exception('<b>no</b> roles') }}")
    expect(problem).to_contain_text("<b>no</b> roles")
    take_pictures(editor, "template-fault")


def test_the_chat_s_own_prompt_is_shown_as_it_is_now(editor: Page) -> None:
    editor.get_by_role("tab", name="Chat").click()
    editor.locator("#system-prompt textarea").fill("Be brief.")
    send(editor, "héllo?")
    expect(answer(editor)).to_contain_text("Hello, world!")
    editor.get_by_role("tab", name="Templates").click()
    editor.get_by_label("This chat").check()
    preview = editor.locator("#prompt-preview .pw-tokens")
    expect(preview).to_contain_text("·".join(("system⏎Be", "brief.")))
    expect(preview).to_contain_text("‹c3›‹a9›llo?")
    editor.get_by_label("An example").check()
    editor.locator("#system-prompt textarea").fill("")


def test_the_difference_from_the_models_own_is_shown_and_restored(editor: Page) -> None:
    choose(editor, "Template", "Model: default")
    write_template(editor, CHATML + "{# <script>more</script> #}")
    editor.get_by_text("Difference from the model's own").click()
    expect(editor.locator("#template-diff ins")).to_contain_text("<script>more</script>")
    editor.locator("#restore-template").click()
    expect(editor.locator("#template-diff")).to_contain_text("It is the model's own template")
    editor.get_by_text("Difference from the model's own").click()


def test_templates_are_saved_exported_imported_and_deleted(editor: Page, tmp_path: Path) -> None:
    write_template(editor, "mine")
    editor.locator("#template-name input, #template-name textarea").fill("<i>my</i> own")
    editor.locator("#save-template").click()
    expect(editor.locator("#template-note")).to_contain_text("Saved in this browser")
    with editor.expect_download() as download:
        editor.locator("#export-template").click()
    download.value.save_as(tmp_path / "mine.jinja")
    assert (tmp_path / "mine.jinja").read_text() == "mine"
    editor.reload()
    editor.get_by_role("tab", name="Templates").click()
    choose(editor, "Template", "Saved: <i>my</i> own")
    expect(editor.locator("#template-editor .cm-content")).to_have_text("mine")
    for content, told in ((b"\xff\xfe\x00", "is not text"), (b"theirs", "Imported other.jinja")):
        with editor.expect_file_chooser() as chooser:
            editor.locator("#import-template").click()
        chooser.value.set_files(
            {"name": "other.jinja", "mimeType": "text/plain", "buffer": content}
        )
        expect(editor.locator("#template-note")).to_contain_text(told)
    expect(editor.locator("#template-editor .cm-content")).to_have_text("theirs")
    editor.locator("#delete-template").click()
    expect(editor.locator("#template-note")).to_contain_text("Deleted")
    editor.get_by_label("Template", exact=True).click()
    expect(editor.get_by_role("option", name=re.compile("Saved"))).to_have_count(0)
    editor.keyboard.press("Escape")


def test_a_template_is_used_for_a_chat(editor: Page, engine: FakeEngineClient) -> None:
    new_chat(editor)
    editor.get_by_role("tab", name="Templates").click()
    write_template(editor, "ask: {{ messages[-1].content }}")
    expect(editor.locator("#prompt-count")).to_contain_text(" 0 of them control tokens")
    editor.locator("#use-template").click()
    expect(editor.locator(".pw-template .pw-chip")).to_contain_text("Chat template:")
    send(editor, "hi")
    expect(answer(editor)).to_contain_text("Hello, world!")
    assert prompt_of(engine) == "ask: hi"
    editor.get_by_role("button", name="Use the model's own template again").click()
    send(editor, "hi")
    expect(editor.locator(".bot.message")).to_have_count(2)
    expect(answer(editor)).to_contain_text("Hello, world!")
    assert prompt_of(engine).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_text_is_shown_as_tokens_with_their_ids(opened: Page) -> None:
    opened.get_by_role("tab", name="Tokenizer").click()
    count, tokens = opened.locator("#token-count"), opened.locator("#tokenizer-tokens .pw-token")
    opened.get_by_label("Text", exact=True).fill("é<s><script>alert(1)</script>")
    expect(count).to_contain_text("28 tokens")
    expect(tokens.nth(0)).to_have_text("‹c3›")
    expect(tokens.nth(2)).to_have_class(re.compile("control"))
    tokens.nth(2).hover()
    expect(opened.locator("#tokenizer-tokens .pw-token-card")).to_contain_text("id 256")
    expect(opened.locator("#tokenizer-tokens .pw-token-card")).to_contain_text("control token")
    opened.get_by_label("Read control tokens in the text").click()
    expect(count).to_contain_text("30 tokens")
    take_pictures(opened, "tokenizer")
    opened.get_by_label("Text", exact=True).fill("x" * 5000)
    expect(count).to_contain_text("5000 tokens")
    expect(opened.locator("#tokenizer-tokens")).to_contain_text("3000 more tokens")
