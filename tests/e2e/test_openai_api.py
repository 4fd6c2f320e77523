"""The OpenAI API over real sockets: clients that leave, large bodies, an engine that is away."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.openai_api import middleware
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend, sse_events

HUNDRED_MB = 100 << 20
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
async def server(engine: FakeEngineClient) -> AsyncIterator[FrontendServer]:
    async with running_frontend(engine, max_request_bytes=1 << 20) as server:
        yield server


@pytest.fixture
async def http(server: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client


def client_of(server: FrontendServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.http_port}", timeout=60, trust_env=False
    )


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


async def open_request(
    server: FrontendServer, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request on a bare connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def test_streams_add_up_to_the_whole_answer(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, done = sse_events(streamed.text)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"] == "Hello, world!"
    assert done == "[DONE]"


async def test_tokens_come_when_they_are_made(
    engine: FakeEngineClient, http: httpx.AsyncClient
) -> None:
    engine.hang_after = 3
    body = {"prompt": "a", "stream": True}
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if text == "Hel":
                break


async def test_both_loopbacks_answer_on_one_port(server: FrontendServer) -> None:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            response = await client.get(f"http://{host}:{server.http_port}/health")
        assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, 1),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, 3),
    ],
)
async def test_a_client_that_leaves_aborts_all_it_asked_for(
    engine: FakeEngineClient,
    server: FrontendServer,
    path: str,
    body: dict[str, Any],
    num_requests: int,
    stream: bool,
) -> None:
    engine.hang_after = 2
    reader, writer = await open_request(server, path, {**body, "stream": stream})
    if stream:
        await reader.readuntil(b"data: ")
    await until(lambda: len(engine.live) == num_requests)
    writer.close()
    await until(lambda: len(engine.aborted) == num_requests)
    assert engine.live == set()


async def test_a_live_request_id_is_refused_and_a_later_one_is_fine(
    engine: FakeEngineClient, http: httpx.AsyncClient
) -> None:
    engine.hang_after = 1
    body = {"messages": MESSAGES, "stream": True}
    headers = {"X-Request-Id": "same"}
    path = "/v1/chat/completions"
    async with http.stream("POST", path, json=body, headers=headers) as response:
        await anext(response.aiter_lines())
        second = await http.post(path, json=body, headers=headers)
        assert second.status_code == 400
        assert second.json()["error"]["code"] == "already_exists"
    await until(lambda: engine.aborted)
    engine.hang_after = None
    third = await http.post(path, json=body, headers=headers)
    assert third.status_code == 200


@pytest.mark.parametrize("length_known", [True, False])
async def test_a_body_of_100_mb_is_413_and_the_server_lives(
    http: httpx.AsyncClient, length_known: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(HUNDRED_MB >> 16):
            yield b"x" * (1 << 16)

    headers = {"content-type": "application/json"}
    if length_known:
        headers["content-length"] = str(HUNDRED_MB)
    # Client and server share this process.
    tracemalloc.start()
    try:
        response = await http.post("/v1/completions", content=chunks(), headers=headers)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert (await http.get("/health")).status_code == 200


async def test_an_endless_upload_is_cut(
    server: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
    assert answer.startswith(b"HTTP/1.1 413 ")

    async def upload() -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            await asyncio.sleep(0.05)

    with pytest.raises(ConnectionError):  # reset or broken pipe, as the kernel likes
        await asyncio.wait_for(upload(), 60)


async def test_health_is_503_while_the_engine_is_away_and_live_stays_200(
    engine: FakeEngineClient, http: httpx.AsyncClient
) -> None:
    engine.is_ready = False
    health = await http.get("/health")
    assert health.status_code == 503
    assert "away" in health.json()["reason"]
    assert (await http.get("/health/live")).status_code == 200
    assert 'pagewire_engine_ready{model_name="fake-model"} 0.0' in (await http.get("/metrics")).text
    engine.is_ready = True
    assert (await http.get("/health")).status_code == 200
    assert 'pagewire_engine_ready{model_name="fake-model"} 1.0' in (await http.get("/metrics")).text


async def test_an_engine_that_comes_back_with_another_model_is_asked_for_its_tokenizer(
    engine: FakeEngineClient, http: httpx.AsyncClient
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    await http.post("/v1/chat/completions", json=body)
    engine.chat_template = "{{ messages[0].content }}"
    engine.tokenizer_sha256 = "another"
    # Never with the old tokenizer: refused until the new one is there.
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 503)
    for _ in range(600):
        if (await http.get("/health")).status_code == 200:
            break
        await asyncio.sleep(0.05)
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert {len(request.prompt_token_ids) for request in engine.requests[1:]} == {len("hi")}


async def test_before_the_engine_is_there_requests_are_503() -> None:
    engine = FakeEngineClient(reachable=False)
    server = FrontendServer(FrontendConfig(http_port=0, grpc_port=0), engine)
    await server.start(wait_for_engine=False)
    try:
        async with client_of(server) as http:
            assert (await http.get("/health/live")).status_code == 200
            for method, path in (("GET", "/health"), ("GET", "/v1/models")):
                assert (await http.request(method, path)).status_code == 503
            response = await http.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 503
            assert "127.0.0.1:50061" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0
    finally:
        await server.stop(0.0)


async def test_an_engine_that_dies_in_mid_stream_is_an_error_event(
    engine: FakeEngineClient, http: httpx.AsyncClient
) -> None:
    engine.fail_after = 2
    response = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    *_, error, done = sse_events(response.text)
    assert error["error"]["code"] == "unavailable"
    assert done == "[DONE]"


async def test_a_silent_stream_sends_comments(engine: FakeEngineClient) -> None:
    engine.hang_after = 0
    async with running_frontend(engine, sse_keepalive_s=0.05) as server:
        body = {"prompt": "a", "stream": True}
        reader, writer = await open_request(server, "/v1/completions", body)
        head = await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 60)
        assert head.startswith(b"HTTP/1.1 200 OK")
        await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 60)
        writer.close()
        await until(lambda: engine.aborted)


async def test_a_stop_in_mid_stream_aborts_after_the_grace_period(
    engine: FakeEngineClient,
) -> None:
    engine.hang_after = 1
    async with running_frontend(engine) as server:
        body = {"prompt": "a", "stream": True}
        reader, writer = await open_request(server, "/v1/completions", body)
        await reader.readuntil(b"data: ")
        await asyncio.wait_for(server.stop(), 60)
        assert len(engine.aborted) == 1
        assert engine.closed
        writer.close()


async def test_a_stopping_server_lets_running_streams_end(engine: FakeEngineClient) -> None:
    engine.delay_s = 0.02
    async with running_frontend(engine, grace_period_s=60.0) as server:
        body = {"prompt": "a", "stream": True}
        reader, writer = await open_request(server, "/v1/completions", body)
        await reader.readuntil(b"data: ")
        stopping = asyncio.create_task(server.stop())
        assert b"[DONE]" in await asyncio.wait_for(reader.read(), 60)
        await stopping
        assert engine.aborted == []
        writer.close()


async def test_no_prompt_text_in_the_log(
    engine: FakeEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", logger="uvicorn")  # a test before may have run a quieter server
    engine.failure = RuntimeError("quotes a-secret-prompt")  # type: ignore[assignment]  # a bug
    async with running_frontend(engine, log_level="debug") as server, client_of(server) as http:
        for fail_after in (None, 0, 2):
            engine.fail_after = fail_after
            for stream in (False, True):
                body = {"prompt": "a-secret-prompt", "stream": stream}
                await http.post("/v1/completions", json=body)
    assert "POST /v1/completions" in caplog.text
    assert "a request failed with RuntimeError" in caplog.text
    assert "a-secret-prompt" not in caplog.text
