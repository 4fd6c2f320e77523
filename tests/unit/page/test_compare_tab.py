"""What the two sides of a comparison are shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from pagewire_ui import compare_tab
from pagewire_ui.chat_client import ChatProgress, ChatSettings
from pagewire_ui.compare_tab import CompareTab


class Answers:
    """A client both of whose answers end when they are let."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def answer(self, *asked: Any) -> AsyncIterator[ChatProgress]:
        yield ChatProgress(text="so far")
        await self.ends.wait()
        yield ChatProgress(text="so far", reason="cancelled", is_over=True)


async def test_an_end_is_shown_that_comes_while_what_was_before_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_tab, "read", lambda values: ChatSettings())
    client: Any = Answers()
    tab = CompareTab(client)
    tab._panel = MagicMock()
    shown = tab._ask(MagicMock(session_hash="me"), 1, "which?", "", "sql")
    value = await anext(shown)
    while value["left"]["text"] != "so far":
        value = await anext(shown)
    client.ends.set()
    await asyncio.sleep(0.01)
    *_, last = [value async for value in shown]
    assert [last[side]["reason"] for side in ("left", "right")] == ["cancelled", "cancelled"]
