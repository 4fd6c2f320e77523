"""What can be done with a conversation in a real browser: change it, keep it, carry it along."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import answer, choose, new_chat, page_at, send, take_pictures
from tests.ui.fake_inference import FakeInference

MARKDOWN = """write # Paging

Some **bold**, *italics*, `code` and a [link](https://example.org/x),
[not one](javascript:alert(1)).

1. one
2. two
   - nested

| name | tok/s |
|---|--:|
| a | 12.5 |

> quoted

```python
def f(x: int) -> str:
    return "a" * x  # says it
```
![picture](https://example.org/pixel.png) <img src=x onerror="document.title='owned'">"""


@pytest.fixture(scope="module")
def opened(browser: Browser, page_url: str, frontend: FakeInference) -> Iterator[Page]:
    with page_at(browser, page_url, height=800, accept_downloads=True) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        yield page


@pytest.fixture
def chat(opened: Page) -> Page:
    new_chat(opened)
    return opened


def until_copied(page: Page, text: str) -> None:
    """The browser takes a text to the clipboard when it has the time."""
    page.wait_for_function(
        "async (text) => (await navigator.clipboard.readText()) === text", arg=text
    )


def asked(frontend: FakeInference) -> list[tuple[str, str]]:
    """The turns of the last question."""
    return [(m.role, m.content[0].text) for m in frontend.requests[-1].messages]


def test_an_answer_is_drawn_as_markdown_and_nothing_in_it_runs(chat: Page) -> None:
    hosts: set[str] = set()
    chat.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    send(chat, MARKDOWN)
    expect(answer(chat)).to_contain_text("onerror")
    expect(answer(chat).locator(".pw-figures")).to_contain_text("tok/s")
    drawn = answer(chat).locator(".pw-markdown").last
    expect(drawn.locator("h3")).to_have_text("Paging")
    expect(drawn.locator("strong")).to_have_text("bold")
    expect(drawn.locator("ol > li ul li")).to_have_text("nested")
    expect(drawn.locator("td.pw-right")).to_have_text("12.5")
    expect(drawn.locator("td.pw-right")).to_have_css("text-align", "right")
    expect(drawn.locator("blockquote")).to_have_text("quoted")
    expect(drawn.locator(".pw-code-keyword").first).to_have_text("def")
    expect(drawn.locator("a").first).to_have_attribute("rel", "noopener noreferrer nofollow")
    assert drawn.locator("img, script").count() == 0
    assert all(link.get_attribute("href").startswith("https:")  # type: ignore[union-attr]
               for link in drawn.locator("a").all())  # fmt: skip
    assert chat.title() == "pagewire chat"
    assert "example.org" not in hosts
    drawn.get_by_role("button", name="Copy code").click()
    until_copied(chat, 'def f(x: int) -> str:\n    return "a" * x  # says it')
    take_pictures(chat, "chat")


def test_whatever_a_model_writes_becomes_harmless_nodes_in_a_moment(chat: Page) -> None:
    # Quadratic time would take minutes.
    begun = time.monotonic()
    assert chat.evaluate((Path(__file__).parent / "hostile_markdown.js").read_text()) == []
    assert time.monotonic() - begun < 100


def test_reasoning_is_folded_apart_from_the_answer(chat: Page, frontend: FakeInference) -> None:
    send(chat, "think then speak")
    expect(answer(chat).locator(".pw-markdown").last).to_have_text("then speak")
    folded = answer(chat).locator("details")
    expect(folded).not_to_have_attribute("open", re.compile(".*"))
    folded.locator("summary").click()
    expect(folded).to_contain_text("First I think <b>hard</b>.")
    send(chat, "and now")
    expect(answer(chat)).to_contain_text("You said: and now")
    assert asked(frontend)[1] == ("assistant", "then speak")


def test_questions_and_answers_are_edited_retried_and_undone(
    chat: Page, frontend: FakeInference
) -> None:
    before = len(frontend.requests)
    send(chat, "one")
    expect(answer(chat)).to_contain_text("You said: one")
    answer(chat).get_by_role("button", name="Ask again").click()
    expect(answer(chat).locator(".pw-actions")).to_be_visible()
    assert asked(frontend) == [("user", "one")]
    assert len(frontend.requests) == before + 2
    send(chat, "two")
    expect(answer(chat)).to_contain_text("You said: two")
    first = chat.locator(".user.message").first
    first.hover()
    first.get_by_role("button", name="Edit message").click()
    first.get_by_label("Edit text").fill("uno")
    first.get_by_role("button", name="Ask again").click()
    expect(answer(chat)).to_contain_text("You said: uno")
    expect(chat.locator(".message")).to_have_count(2)
    answer(chat).get_by_role("button", name="Edit answer").click()
    answer(chat).get_by_label("Edit text").fill("I said so.")
    answer(chat).get_by_role("button", name="Keep").click()
    send(chat, "three")
    expect(answer(chat)).to_contain_text("You said: three")
    assert asked(frontend)[:2] == [("user", "uno"), ("assistant", "I said so.")]
    answer(chat).get_by_role("button", name="Undo").click()
    expect(chat.locator("#message textarea")).to_have_value("three")
    expect(chat.locator(".message")).to_have_count(2)
    answer(chat).get_by_role("button", name="Copy answer").click()
    until_copied(chat, "I said so.")
    chat.locator("#message textarea").fill("")


def test_a_retry_that_fails_keeps_the_old_answer(chat: Page, frontend: FakeInference) -> None:
    send(chat, "hello")
    expect(answer(chat)).to_contain_text("You said: hello")
    frontend.refuses = True
    try:
        answer(chat).get_by_role("button", name="Ask again").click()
        expect(chat.get_by_role("alert")).to_contain_text("busy")
    finally:
        frontend.refuses = False
    expect(answer(chat)).to_contain_text("You said: hello")


def test_the_keyboard_alone_will_do(chat: Page, frontend: FakeInference) -> None:
    box = chat.locator("#message textarea")
    expect(box).to_be_focused()
    chat.keyboard.type("slow one")
    chat.keyboard.press("Enter")
    expect(answer(chat)).to_contain_text("word2")
    chat.keyboard.press("Escape")
    expect(chat.locator("#status")).to_contain_text("stopped by you")
    chat.keyboard.press("ArrowUp")
    edit = chat.get_by_label("Edit text")
    expect(edit).to_be_focused()
    edit.fill("quick one")
    chat.keyboard.press("Control+Enter")
    expect(answer(chat)).to_contain_text("You said: quick one")


def test_tokens_show_their_alternatives(chat: Page) -> None:
    send(chat, "alpha beta")
    expect(answer(chat)).to_contain_text("alpha beta")
    answer(chat).get_by_role("button", name="Tokens").click()
    token = answer(chat).locator(".pw-token").nth(2)
    token.hover()
    card = answer(chat).locator(".pw-token-card")
    expect(card).to_contain_text("id 2")
    expect(card).to_contain_text("<i>else</i>")
    expect(card).to_contain_text("77.9 %")
    expect(card).to_contain_text("8.2 %")
    take_pictures(chat, "alternatives")
    chat.keyboard.press("Tab")
    answer(chat).locator(".pw-token").first.focus()
    chat.keyboard.press("ArrowRight")
    expect(card).to_contain_text("id 1")


@pytest.mark.slow
def test_presets_set_the_sampling_or_leave_it_to_the_model(
    chat: Page, frontend: FakeInference
) -> None:
    choose(chat, "Sampling", "Precise")
    chat.get_by_text("More sampling").click()
    chat.get_by_label("Stop strings").fill("END\nFIN")
    send(chat, "hello")
    expect(answer(chat)).to_contain_text("You said: hello")
    request = frontend.requests[-1]
    assert (request.sampling_params.temperature, request.sampling_params.top_p) == (0, 1)
    assert list(request.text_params.stop) == ["END", "FIN"]
    choose(chat, "Sampling", "Model's own")
    expect(chat.locator("#temperature")).not_to_be_visible()
    send(chat, "again")
    expect(answer(chat)).to_contain_text("You said: again")
    params = frontend.requests[-1].sampling_params
    assert not params.HasField("temperature")
    assert not params.HasField("top_p")
    chat.get_by_label("Stop strings").fill("")
    choose(chat, "Sampling", "Balanced")
    # A conversation brings its settings back.
    new_chat(chat)
    chat.locator(".pw-conversations .pw-open").first.click()
    expect(chat.locator("#temperature")).not_to_be_visible()
    choose(chat, "Sampling", "Balanced")
    chat.get_by_text("More sampling").click()


def test_files_go_with_a_message_or_are_refused(chat: Page, frontend: FakeInference) -> None:
    files = chat.get_by_label("Files to attach")
    files.set_input_files({"name": "cat.png", "mimeType": "image/png", "buffer": b"\x89PNG"})
    expect(chat.get_by_role("alert")).to_contain_text("cat.png is an image")
    files.set_input_files({"name": "x.bin", "mimeType": "", "buffer": b"\xff\x00"})
    expect(chat.get_by_role("alert")).to_contain_text("x.bin is not text")
    big = {"name": "big.txt", "mimeType": "text/plain", "buffer": b"a" * 300_000}
    files.set_input_files(big)
    expect(chat.get_by_role("alert")).to_contain_text("big.txt has 300.0 kB")
    expect(chat.locator("#message .pw-chip")).to_have_count(0)
    note = {"name": "note.md", "mimeType": "text/markdown", "buffer": "a ``` b é".encode()}
    files.set_input_files(note)
    expect(chat.locator("#message .pw-chip")).to_contain_text("note.md")
    send(chat, "read this")
    expect(answer(chat)).to_contain_text("You said: read this")
    assert asked(frontend)[-1][1] == "read this\n\nFile note.md:\n````\na ``` b é\n````"
    expect(chat.locator(".user.message .pw-chip")).to_contain_text("note.md")


@pytest.mark.slow
def test_a_fast_answer_does_not_flood_the_browser(chat: Page) -> None:
    chat.evaluate(
        """() => { window.draws = 0; new MutationObserver(() => { window.draws += 1; }).observe(
          document.querySelector("#conversation"), {subtree: true, childList: true}); }"""
    )
    begun = time.monotonic()
    send(chat, "fast 300")
    expect(answer(chat)).to_contain_text("word299")
    expect(answer(chat).locator(".pw-figures")).to_contain_text("300 tokens")
    # At most 25 pictures a second, however many tokens come.
    assert chat.evaluate("window.draws") <= 25 * (time.monotonic() - begun) + 10


@pytest.mark.slow
def test_two_tabs_answer_at_once_and_know_nothing_of_each_other(
    chat: Page, page_url: str, frontend: FakeInference
) -> None:
    other = chat.context.new_page()
    other.goto(page_url)
    expect(other.locator("#conversation .placeholder")).to_be_visible()
    send(chat, "slow left")
    expect(answer(chat)).to_contain_text("word1")
    send(other, "secret right")
    expect(answer(other).locator(".pw-figures")).to_contain_text("4 tokens")
    expect(answer(other)).to_contain_text("You said: secret right")
    assert asked(frontend) == [("user", "secret right")]
    expect(chat.locator("#conversation")).not_to_contain_text("secret")
    expect(other.locator("#conversation")).not_to_contain_text("left")
    chat.locator("#message button.stop-button").click()
    expect(chat.locator("#status")).to_contain_text("stopped by you")
    # Both are kept, and each tab comes back with its own.
    for tab, text in ((chat, "slow left"), (other, "secret right")):
        tab.reload()
        expect(tab.locator(".user.message")).to_contain_text(text)
        expect(tab.locator(".pw-conversations")).to_contain_text("secret right")
    expect(answer(other).locator(".pw-figures")).to_contain_text("4 tokens")
    other.close()


def imported(page: Page, content: Any) -> None:
    """Imports a file of conversations."""
    text = content if isinstance(content, str) else json.dumps(content)
    with page.expect_file_chooser() as chooser:
        page.locator("#import-conversations").click()
    chooser.value.set_files(
        {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()}
    )


def test_conversations_are_exported_imported_and_bad_files_refused(
    chat: Page, tmp_path: Path
) -> None:
    send(chat, "keep me")
    expect(answer(chat)).to_contain_text("You said: keep me")
    with chat.expect_download() as download:
        chat.locator("#export-conversations").click()
    download.value.save_as(tmp_path / "out.json")
    exported = json.loads((tmp_path / "out.json").read_text())
    kept = next(c for c in exported["conversations"] if c["title"] == "keep me")
    assert [m["text"].strip() for m in kept["messages"]] == ["keep me", "You said: keep me"]
    good = {"format": "pagewire.conversations", "version": 1}
    message = {"role": "user", "text": "x"}
    listed = chat.locator(".pw-conversations li")
    before = listed.count()
    for content, problem in (
        ("{", "not JSON"),
        ([], "no export of conversations"),
        ({**good, "version": 2, "conversations": []}, "version is 2"),
        ({**good, "conversations": {}}, "must be a list"),
        ({**good, "conversations": [{"messages": [{**message, "role": "root"}]}]}, "role"),
        ({**good, "conversations": [{"messages": [{**message, "text": 5}]}]}, "text must be text"),
        ({**good, "conversations": [{"messages": [], "settings": {"a": []}}]}, "settings.a"),
    ):
        imported(chat, content)
        expect(chat.locator("#conversations").get_by_role("alert")).to_contain_text(problem)
    assert listed.count() == before
    title = "<img src=x onerror=\"document.title='owned'\">"
    item = {"title": title, "messages": [message, {"role": "assistant", "text": "<b>y</b>"}]}
    imported(chat, {**good, "conversations": [item, {**kept, "title": "copy"}]})
    expect(chat.locator("#conversations")).to_contain_text("Imported 2 conversations")
    expect(listed).to_have_count(before + 2)
    listed.get_by_text(title, exact=True).click()
    expect(answer(chat)).to_contain_text("<b>y</b>")
    assert chat.title() == "pagewire chat"
    chat.once("dialog", lambda dialog: dialog.accept())
    listed.filter(has_text="<img").hover()
    listed.filter(has_text="<img").get_by_role("button", name="Delete").click()
    expect(listed).to_have_count(before + 1)
