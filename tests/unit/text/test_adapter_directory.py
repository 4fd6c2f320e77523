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

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        bad = engine_pb2.AdapterInfo(name="bad", version="1", has_chat_template=True)
        good = engine_pb2.AdapterInfo(name="good", version="1")
        return engine_pb2.ListAdaptersResponse(adapters=[bad, good])

    async def adapter_files(self, name: str, version: str) -> Mapping[str, bytes]:
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


class ChangingClient(Client):
    """Has an adapter in the version it is told, with a template in that."""

    version, template, revision = "1", b"x", 1
    num_lists = 0

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        self.num_lists += 1
        await asyncio.sleep(0)
        if unless_revision == str(self.revision):
            return engine_pb2.ListAdaptersResponse(revision=unless_revision)
        info = engine_pb2.AdapterInfo(name="a", version=self.version, has_chat_template=True)
        return engine_pb2.ListAdaptersResponse(adapters=[info], revision=str(self.revision))

    async def adapter_files(self, name: str, version: str) -> Mapping[str, bytes]:
        if version != self.version:
            raise FailedPreconditionError("has another version now")
        return {"chat_template.jinja": self.template}

    def replace(self, version: str, template: bytes) -> None:
        self.version, self.template = version, template
        self.revision += 1


def _directory(client: Client) -> AdapterDirectory:
    text = TextSide(small_tokenizers.byte_level(), None)
    return AdapterDirectory(cast(EngineClient, client), text, {})


async def test_who_asks_while_others_wait_shares_their_question() -> None:
    client = ChangingClient()
    directory = _directory(client)
    await asyncio.gather(*(directory.look_up("unknown") for _ in range(50)))
    assert client.num_lists == 2, "the first could not know what the others asked for"


async def test_new_weights_with_the_same_template_keep_its_text_side() -> None:
    client = ChangingClient()
    directory = _directory(client)
    await directory.refresh()
    first = directory.find("a")
    client.replace("2", b"x")
    await directory.refresh()
    second = directory.find("a")
    client.replace("3", b"y")
    await directory.refresh()
    third = directory.find("a")
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.info.version, second.info.version, third.info.version) == ("1", "2", "3")
    assert first.text is second.text is not third.text
    assert first.text_version == second.text_version != third.text_version


async def test_one_that_is_replaced_while_its_files_are_fetched_is_asked_for_again() -> None:
    client = ChangingClient()
    directory = _directory(client)

    async def adapter_files(name: str, version: str) -> Mapping[str, bytes]:
        del client.adapter_files  # type: ignore[method-assign]
        client.version = "2"
        return await client.adapter_files(name, version)

    client.adapter_files = adapter_files  # type: ignore[method-assign]
    await directory.refresh()
    assert directory.find("a") is None
    await directory.refresh()
    found = directory.find("a")
    assert found is not None
    assert found.info.version == "2"
