"""One adapter that can't be read keeps no other from being found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagewire.errors import FailedPreconditionError
from pagewire.v1 import engine_pb2
from pagewire_frontend import server as server_module
from pagewire_frontend.adapters import AdapterDirectory, TextSide
from pagewire_frontend.chat_template import ChatTemplate
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.engine_client.base import EngineClient
from pagewire_frontend.server import FrontendServer
from tests.fakes import small_tokenizers


class Panic(BaseException):
    """As `tokenizers` raises it."""


class Client:
    """Has an adapter "bad", which ships a template, and one "good"."""

    model_info = SimpleNamespace(max_loras=1)

    async def list_adapters(self) -> engine_pb2.ListAdaptersResponse:
        bad = engine_pb2.AdapterInfo(name="bad", version="1", has_chat_template=True)
        good = engine_pb2.AdapterInfo(name="good", version="1")
        return engine_pb2.ListAdaptersResponse(adapters=[bad, good])

    async def adapter_files(self, name: str) -> Mapping[str, bytes]:
        return {"chat_template.jinja": b"x"}


@pytest.mark.parametrize("error", [ValueError("odd"), RecursionError(), Panic()])
async def test_whatever_a_shipped_template_raises_is_its_adapter_s_trouble(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def from_files(*args: Any) -> ChatTemplate:
        raise error

    monkeypatch.setattr(ChatTemplate, "from_files", from_files)
    text = TextSide(small_tokenizers.byte_level(), None)
    directory = AdapterDirectory(cast(EngineClient, Client()), text, {})
    await directory.refresh()
    assert [each.name for each in directory.known()] == ["bad", "good"]
    with pytest.raises(FailedPreconditionError, match=type(error).__name__):
        directory.find("bad")
    assert directory.find("good") is not None


async def test_adapters_are_followed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_ADAPTER_POLL_S", 0.0)
    errors: list[Exception] = [ValueError("odd")]
    went_on = asyncio.Event()

    async def refresh() -> None:
        if errors:
            raise errors.pop()
        went_on.set()

    server: Any = FrontendServer(FrontendConfig(), cast(EngineClient, Client()))
    adapters = SimpleNamespace(refresh=refresh)
    server._serving = SimpleNamespace(ready=True, generation=SimpleNamespace(adapters=adapters))
    following = asyncio.create_task(server._follow_adapters())
    try:
        async with asyncio.timeout(20.0):
            await went_on.wait()
    finally:
        following.cancel()
