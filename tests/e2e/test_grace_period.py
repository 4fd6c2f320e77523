"""What still runs when a frontend's grace period is over is told so, once, in the shape of its API,
and the log has no traceback of it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_pb2
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import FakeEngineClient, FakeStream
from tests.fakes.frontend import chat_request, grpc_stub, running_frontend, sse_events

GRACE_S = 0.3
CHAT = [{"role": "user", "content": "hi"}]
WHOLE = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture
def engine() -> FakeEngineClient:
    """Requests begin, and never end."""
    return FakeEngineClient(hang_after=1)


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def post(server: FrontendServer, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(f"http://127.0.0.1:{server.http_port}{path}", json=body)


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


async def ended_by_shutdown(
    engine: FakeEngineClient, ask: Callable[[FrontendServer], Awaitable[Any]], **config: Any
) -> tuple[Any, FrontendServer]:
    """What a client gets that asks a server which is stopped once the engine has its request."""
    async with running_frontend(engine, grace_period_s=GRACE_S, **config) as server:
        asking = asyncio.ensure_future(ask(server))
        async with asyncio.timeout(30):
            while not engine.requests:  # noqa: ASYNC110  # what the engine sees
                await asyncio.sleep(0.01)
        await asyncio.wait_for(server.stop(), 60)
        return await asyncio.wait_for(asking, 30), server


def failures(server: FrontendServer) -> dict[str, float]:
    """Failed requests by code."""
    (family,) = [
        each
        for each in server._serving.metrics.registry.collect()
        if each.name == "pagewire_request_failure"
    ]
    return {
        sample.labels["code"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


@pytest.mark.parametrize("path", WHOLE)
async def test_an_answer_in_full_becomes_an_error_that_says_unavailable(
    path: str, engine: FakeEngineClient
) -> None:
    response, server = await ended_by_shutdown(engine, lambda s: post(s, path, WHOLE[path]))
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = response.json()["error"]
    assert error["code"] == "unavailable"
    assert "shutting down" in error["message"]
    assert len(engine.aborted) == 1
    assert failures(server) == {"UNAVAILABLE": 1}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_ends_with_one_error_event(path: str, engine: FakeEngineClient) -> None:
    body = {**WHOLE[path], "stream": True}
    response, server = await ended_by_shutdown(engine, lambda s: post(s, path, body))
    *events, error, done = sse_events(response.text)
    assert response.status_code == 200
    assert [event for event in events if "error" in event] == []
    assert events[-1]["choices"]
    assert error["error"]["code"] == "unavailable"
    assert done == "[DONE]"
    assert failures(server) == {"UNAVAILABLE": 1}


async def test_a_stream_of_several_prompts_ends_with_one_error_event(
    engine: FakeEngineClient,
) -> None:
    body = {"prompt": ["a", "b", "c"], "stream": True}
    response, server = await ended_by_shutdown(engine, lambda s: post(s, "/v1/completions", body))
    events = sse_events(response.text)
    assert ["error" in event for event in events[-2:]] == [True, False]
    assert sum("error" in event for event in events) == 1
    assert len(engine.aborted) == 3
    assert failures(server) == {"UNAVAILABLE": 3}


async def test_a_stream_of_responses_fails(engine: FakeEngineClient) -> None:
    body = {"input": "hi", "stream": True}
    response, _ = await ended_by_shutdown(engine, lambda s: post(s, "/v1/responses", body))
    events = [
        json.loads(block.partition("data: ")[2]) for block in response.text.strip().split("\n\n")
    ]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "unavailable"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary", "Chat", "ChatUnary"])
async def test_a_call_ends_as_unavailable_with_details(
    method: str, engine: FakeEngineClient
) -> None:
    request: Any = chat_request() if "Chat" in method else inference_pb2.GenerateRequest(text="hi")

    async def ask(server: FrontendServer) -> grpc.aio.AioRpcError:
        async with grpc_stub(server) as stub:
            call = getattr(stub, method)(request)
            ended = call if method.endswith("Unary") else read_all(call)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ended
            return caught.value

    error, server = await ended_by_shutdown(engine, ask)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.details()
    (detail,) = rpc_status.from_call(error).details
    assert detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
    assert len(engine.aborted) == 1
    assert failures(server) == {"UNAVAILABLE": 1}


async def test_a_request_that_no_engine_has_taken_yet_is_ended_too(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submit(request: Any) -> FakeStream:
        engine.requests.append(request)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(engine, "submit", submit)
    body = WHOLE["/v1/completions"]
    response, server = await ended_by_shutdown(engine, lambda s: post(s, "/v1/completions", body))
    assert response.status_code == 503
    assert failures(server) == {"UNAVAILABLE": 1}


async def test_a_body_that_has_not_come_is_not_waited_for(engine: FakeEngineClient) -> None:
    async with running_frontend(engine, grace_period_s=GRACE_S) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        await asyncio.sleep(0.1)
        await asyncio.wait_for(server.stop(), 60)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"unavailable"' in answer


async def test_a_client_that_does_not_read_is_cut_off(engine: FakeEngineClient) -> None:
    engine.hang_after = None
    engine.reply = lambda request, index: "x" * 2000
    engine.tokens_a_step, engine.max_model_len = 100, 100_000
    async with running_frontend(engine, grace_period_s=GRACE_S) as server:
        for listener in server._http._sockets:  # or the kernel takes megabytes
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps(
            {"prompt": "hi", "max_tokens": 2000, "n": 10, "logprobs": 1, "stream": True}
        ).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.http_port, limit=1024)
        writer.transport.pause_reading()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(30):
            while not any(  # noqa: ASYNC110  # what the server's transport sees
                connection.flow.write_paused
                for connection in server._http._server.server_state.connections
            ):
                await asyncio.sleep(0.01)
        await asyncio.wait_for(server.stop(), 60)
        assert len(engine.aborted) == 1
        writer.transport.abort()


async def test_what_ends_within_the_grace_period_is_whole(engine: FakeEngineClient) -> None:
    engine.hang_after, engine.delay_s = None, 0.02

    async with running_frontend(engine, grace_period_s=60.0) as server:
        asking = asyncio.create_task(post(server, "/v1/completions", {"prompt": "hi"}))
        while not engine.requests:  # noqa: ASYNC110  # what the engine sees
            await asyncio.sleep(0.01)
        await asyncio.wait_for(server.stop(), 60)
        response = await asking
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == "Hello, world!"
    assert failures(server) == {}
