"""A real browser chats through the page."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import answer, send
from tests.ui.fake_inference import FakeInference


@pytest.fixture
def frontend(frontend_port: int) -> Iterator[FakeInference]:
    fake = FakeInference()
    fake.start(frontend_port)
    yield fake
    fake.stop()


def test_an_answer_is_streamed_with_the_settings_of_the_page(
    page: Page, frontend: FakeInference
) -> None:
    asked_hosts: set[str] = set()
    page.on("request", lambda request: asked_hosts.add(urlsplit(request.url).hostname or ""))
    page.reload()
    expect(page.locator("#head")).to_contain_text("fake-model")
    page.locator("#system-prompt textarea").fill("Be brief.")
    page.locator("#seed textarea").fill("17")
    send(page, "hello there")
    expect(answer(page)).to_contain_text("You said: hello there")
    status = page.locator("#status")
    expect(status).to_contain_text("4 tokens")
    expect(status).to_contain_text("tok/s")
    expect(status).to_contain_text("prompt 7 tokens")
    request = frontend.requests[-1]
    assert [(m.role, m.content[0].text) for m in request.messages] == [
        ("system", "Be brief."),
        ("user", "hello there"),
    ]
    params = request.sampling_params
    assert (params.seed, params.max_tokens) == (17, 512)
    assert (round(params.temperature, 3), round(params.top_p, 3)) == (0.7, 0.95)
    send(page, "and more")
    expect(answer(page)).to_contain_text("You said: and more")
    assert [m.role for m in frontend.requests[-1].messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    page.locator("#seed textarea").fill("seven")
    send(page, "never sent")
    expect(page.get_by_role("alert")).to_contain_text("Seed must be a whole number")
    assert len(frontend.requests) == 2
    assert frontend.requests[-1].messages[2].content[0].text.strip() == "You said: hello there"
    assert asked_hosts <= {"127.0.0.1", ""}  # nothing from any other host


@pytest.mark.slow
def test_empty_boxes_leave_the_choice_to_the_server(page: Page, frontend: FakeInference) -> None:
    page.locator("#max-tokens textarea").fill("")
    send(page, "hello")
    expect(answer(page)).to_contain_text("You said: hello")
    params = frontend.requests[-1].sampling_params
    assert not params.HasField("max_tokens")
    assert not params.HasField("seed")
    assert [message.role for message in frontend.requests[-1].messages] == ["user"]


def test_stop_cancels_the_call(page: Page, frontend: FakeInference) -> None:
    send(page, "slow please")
    expect(answer(page)).to_contain_text("word3")
    page.locator("#message button.stop-button").click()
    expect(page.locator("#status")).to_contain_text("stopped by you")
    assert frontend.stops_answering("slow please")
    # What came stays, and the next message is answered.
    expect(answer(page)).to_contain_text("word3")
    send(page, "hello again")
    expect(answer(page)).to_contain_text("You said: hello again")


@pytest.mark.slow
def test_closing_the_page_cancels_the_call(
    browser: Browser, page_url: str, frontend: FakeInference
) -> None:
    opened = browser.new_page()
    opened.goto(page_url)
    send(opened, "slow please")
    expect(answer(opened)).to_contain_text("word1")
    assert frontend.is_answering("slow please")
    opened.close()
    assert frontend.stops_answering("slow please")


def test_a_refusal_is_shown_and_the_message_kept_for_another_try(
    page: Page, frontend: FakeInference
) -> None:
    send(page, "fail now")
    expect(page.get_by_role("alert")).to_contain_text("The server is busy")
    expect(page.locator("#message textarea")).to_have_value("fail now")


@pytest.mark.slow
def test_an_answer_that_breaks_off_keeps_what_came(page: Page, frontend: FakeInference) -> None:
    send(page, "break it")
    expect(page.get_by_role("alert")).to_contain_text("can't be reached")
    expect(answer(page)).to_contain_text("You said:")


@pytest.mark.slow
def test_the_page_waits_for_a_frontend_that_is_not_up_yet(page: Page, frontend_port: int) -> None:
    expect(page.locator("#head")).to_contain_text("Waiting for the model server")
    send(page, "anybody?")
    expect(page.get_by_role("alert")).to_contain_text("can't be reached")
    late = FakeInference()
    late.start(frontend_port)
    try:
        expect(page.locator("#head")).to_contain_text("fake-model")
        page.locator("#message textarea").press("Enter")
        expect(answer(page)).to_contain_text("You said: anybody?")
    finally:
        late.stop()


def test_what_a_model_writes_cannot_run_in_the_page(page: Page, frontend: FakeInference) -> None:
    send(page, "<img src=x onerror=\"document.title='owned'\"> <think>hm</think> a&b")
    expect(answer(page)).to_contain_text("a&b")
    assert page.title() == "pagewire chat"
