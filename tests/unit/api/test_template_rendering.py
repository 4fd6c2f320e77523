"""A template that a request brings may take its whole budget; meanwhile others are served."""

from __future__ import annotations

import asyncio
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
