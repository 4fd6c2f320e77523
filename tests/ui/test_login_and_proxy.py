"""Behind a login, and behind a reverse proxy that shows the page under a path of its own."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect
from pydantic import ValidationError

from pagewire_ui.config import UiConfig
from tests.ui.browser import answer, log_in, send, take_pictures
from tests.ui.fake_inference import FakeInference
from tests.ui.page_process import page_process, reverse_proxy


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[str, str]]:
    """The page's address at the proxy, and its own."""
    fake = FakeInference()
    users = "ann:s3cret,bob:p:w"
    with (
        page_process(fake.start(), "--root-path=/tools/chat", PAGEWIRE_AUTH=users) as own,
        reverse_proxy(own, "/tools/chat") as url,
    ):
        yield url, own
    fake.stop()


@pytest.mark.slow
def test_a_visitor_logs_in_and_chats_under_the_proxy_s_path(
    browser: Browser, proxied: tuple[str, str]
) -> None:
    url, _ = proxied
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    log_in(page, "ann", "wrong")
    expect(page.get_by_text("Incorrect")).to_be_visible()
    take_pictures(page, "login")
    log_in(page, "bob", "p:w")
    expect(page.locator("#head")).to_contain_text("fake-model")
    send(page, "hello there")
    expect(answer(page)).to_contain_text("You said: hello there")
    for tab in ("Compare", "Adapters", "Templates", "Tokenizer", "Engine"):
        page.get_by_role("tab", name=tab).click()
    expect(page.locator("#engine").get_by_role("alert")).to_be_visible()
    # Nothing leaves the path, nor the host.
    expected = urlsplit(url)
    for address in map(urlsplit, asked):
        if address.scheme in ("http", "https"):
            assert address.netloc == expected.netloc
            assert address.path.startswith("/tools/chat")
    page.close()


@pytest.mark.slow
def test_without_a_login_nothing_is_told(proxied: tuple[str, str]) -> None:
    _, own = proxied
    for path in ("config", "gradio_api/info", "gradio_api/queue/data?session_hash=x"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(own + path, timeout=30)
        assert refused.value.code == 401
    request = urllib.request.Request(
        own + "gradio_api/run/predict",
        data=b'{"data": [], "fn_index": 0, "session_hash": "x"}',
        headers={"content-type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 401


@pytest.mark.parametrize(
    ("name", "value"),
    [("auth", "ann"), ("auth", ":pw"), ("auth", "ann:pw,"), ("root_path", "chat"),
     ("root_path", "/a b"), ("root_path", "//evil.example"), ("root_path", "/<script>")],
)  # fmt: skip
def test_settings_that_can_not_be_are_refused_without_telling_secrets(
    name: str, value: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        UiConfig.model_validate({name: value})
    assert "must be" in str(refused.value)


def test_one_kind_of_login_at_a_time() -> None:
    with pytest.raises(ValidationError, match="set one of them"):
        UiConfig.model_validate({"auth": "a:b", "login": True})
    assert UiConfig(root_path="/chat/").root_path == "/chat"
