"""A template that a request brings may take its whole budget; meanwhile others are served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.errors import PagewireError
from pagewire_frontend import generation as generation_module
from pagewire_frontend.generation import Generation
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import make_serving

_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
_MESSAGES = [{"role": "user", "content": "hi"}]


async def generation(**settings: Any) -> Generation:
    serving = await make_serving(FakeEngineClient(), **settings)
    return await serving.generation.find_model("")


async def test_others_are_served_while_a_request_s_template_runs_away() -> None:
    own = await generation(allow_request_chat_template=True)
    running = asyncio.create_task(own.rendered_chat(_MESSAGES, num_bytes=0, chat_template=_ENDLESS))
    for _ in range(20):
        await asyncio.sleep(0)
        assert not running.done()
    with pytest.raises(PagewireError, match="was stopped"):
        await running


async def test_templates_that_requests_bring_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no flood of them leaves the event loop a small part of the processor."""
    own = await generation(allow_request_chat_template=True)
    under_way: list[str] = []
    let_go, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def render_chat(_: object, *, chat_template: str) -> str:
        under_way.append(chat_template)
        loop.call_soon_threadsafe(begun.set)
        assert let_go.wait(30)
        return chat_template

    monkeypatch.setattr(own, "render_chat", render_chat)
    rendering = [
        asyncio.create_task(
            own.rendered_chat(_MESSAGES, num_bytes=0, chat_template=f"{n}{{{{ 1 }}}}")
        )
        for n in range(4)
    ]
    await begun.wait()
    rendering[0].cancel()  # its thread goes on
    rendering[1].cancel()  # it never starts
    await asyncio.sleep(0.05)
    assert under_way == ["0{{ 1 }}"]
    let_go.set()
    assert await asyncio.gather(*rendering[2:]) == ["2{{ 1 }}", "3{{ 1 }}"]
    assert under_way == ["0{{ 1 }}", "2{{ 1 }}", "3{{ 1 }}"]


async def test_the_model_s_own_template_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    own = await generation()

    async def no_thread(*_: object) -> None:
        raise AssertionError("a thread costs more than such a chat does")

    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    for template in (None, "default"):
        rendered = await own.rendered_chat(_MESSAGES, num_bytes=0, chat_template=template)
        assert "hi" in rendered.prompt


async def test_a_chat_of_many_bytes_takes_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    own = await generation()
    in_threads: list[object] = []

    async def to_thread(work: Callable[[], object]) -> object:
        in_threads.append(work)
        return work()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    limit = generation_module._LONG_CHAT_BYTES
    await own.rendered_chat(_MESSAGES, num_bytes=limit)
    assert not in_threads
    await own.rendered_chat(_MESSAGES, num_bytes=limit + 1)
    assert len(in_threads) == 1
