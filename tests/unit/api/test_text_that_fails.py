"""An exception while text is made of one request's tokens fails that request alone (vLLM's issue
21951), in both APIs, streamed and whole; the engine is told to stop it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import httpx
import pytest

from pagewire_frontend.detokenizer import BytesDetokenizer
from tests.fakes.fake_engine_client import FakeEngineClient, ids_of
from tests.fakes.frontend import chat_request, grpc_stub, running_frontend

(POISON,) = ids_of("Q")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = BytesDetokenizer.feed

    def raising(self: BytesDetokenizer, ids: Sequence[int]) -> str:
        if POISON in ids:
            raise ValueError("secret text")
        return feed(self, ids)

    monkeypatch.setattr(BytesDetokenizer, "feed", raising)


def reply(request: Any, index: int) -> str:
    """The prompt "p" gets the token that fails."""
    return "fine Q and more" if ids_of("p")[0] in request.prompt_token_ids else "all is well"


async def test_it_fails_alone_and_its_neighbours_go_on() -> None:
    client = FakeEngineClient(reply=reply, delay_s=0.005, chat_template="{{ messages[0].content }}")
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:

            async def ask(content: str, *, stream: bool) -> str:
                body = {"messages": [{"role": "user", "content": content}], "stream": stream}
                return (await http.post("/v1/chat/completions", json=body)).text

            async def call(content: str) -> Any:
                try:
                    return await stub.ChatUnary(chat_request(content))
                except grpc.aio.AioRpcError as error:
                    return error

            whole, streamed, called, *others = await asyncio.gather(
                ask("p", stream=False),
                ask("p", stream=True),
                call("p"),
                ask("o", stream=False),
                ask("o", stream=True),
                call("o"),
            )
    assert '"server_error"' in whole
    assert '"server_error"' in streamed
    assert '"content":"f"' in streamed
    assert called.code() is grpc.StatusCode.INTERNAL
    for told in (whole, streamed, called.details()):
        assert "secret text" not in told
    assert "all is well" in others[0]
    assert others[1].count("data: ") == len("all is well") + 3
    assert others[2].choices[0].content == "all is well"
    assert len(client.aborted) == 3
    assert not client.live
