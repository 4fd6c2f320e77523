"""HTTP that is odd and legal is served; what is not HTTP, or in no form that is read, is refused in
OpenAI's shape."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend

PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
JSON = "content-type: application/json\r\n"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    client = FakeEngineClient(reply=lambda request, index: "ok")
    async with running_frontend(client) as server:
        yield server.http_port


def request(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    if body:
        headers += f"content-length: {len(body)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode() + body


async def answers_to(port: int, data: bytes) -> bytes:
    """All that comes; the last request has asked for the connection's end, or deserves it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


CLOSE = "connection: close\r\n"


async def test_pipelined_requests_are_answered_in_their_order(port: int) -> None:
    data = b"".join(
        request("POST", PATH, BODY, JSON + f"x-request-id: number-{number}\r\n" + end)
        for number, end in enumerate(("", "", CLOSE))
    )
    told = await answers_to(port, data)
    assert told.count(b"HTTP/1.1 200 OK") == 3
    places = [told.index(b"x-request-id: number-%d" % number) for number in range(3)]
    assert places == sorted(places)


async def test_a_body_in_chunks_of_a_byte_is_read(port: int) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    headers = JSON + CLOSE + "transfer-encoding: chunked\r\n"
    status, answer = parsed(await answers_to(port, request("POST", PATH, b"", headers) + chunks))
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("offered", ["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_passed_over_and_the_body_read(
    port: int, offered: str
) -> None:
    """Java's client offers HTTP/2 with its first request, and sends the body at once."""
    headers = JSON + (
        "connection: Upgrade, HTTP2-Settings\r\n"
        f"upgrade: {offered}\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    )
    data = b"".join(
        request("POST", PATH, BODY, headers + f"x-request-id: number-{number}\r\n" + end)
        for number, end in enumerate(("", "", CLOSE))
    )
    told = await answers_to(port, data)
    assert told.count(b"HTTP/1.1 200 OK") == 3
    assert told.count(b'"content":"ok"') == 3
    chunked = JSON + CLOSE + f"connection: upgrade\r\nupgrade: {offered}\r\n"
    chunked += "transfer-encoding: chunked\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert parsed(await answers_to(port, request("POST", PATH, b"", chunked) + body))[0] == 200


async def test_many_offers_at_once_are_each_answered(port: int) -> None:
    """More than Python's stack is deep."""
    offer = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    data = (offer + b"\r\n") * 1500 + offer + CLOSE.encode() + b"\r\n"
    assert (await answers_to(port, data)).count(b"HTTP/1.1 200 OK") == 1501


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, identity", "xchunked"])
async def test_an_offer_hides_no_body_of_unknown_length(port: int, coding: str) -> None:
    headers = JSON + f"connection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: {coding}\r\n"
    hidden = request("GET", "/ping", b"", CLOSE)
    told = await answers_to(port, request("POST", PATH, b"", headers) + b"0\r\n\r\n" + hidden)
    assert told.count(b"HTTP/1.1 ") == 1
    assert parsed(told)[0] == 400


async def test_an_offer_of_http_1_0_is_passed_over_too(port: int) -> None:
    streaming = BODY[:-1] + b', "stream": true}'
    offer = JSON + "connection: upgrade\r\nupgrade: h2c\r\nx-empty:\r\n"
    data = request("POST", PATH, streaming, offer).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = (await answers_to(port, data)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(port: int) -> None:
    streaming = BODY[:-1] + b', "stream": true}'
    data = request("POST", PATH, streaming, JSON).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = (await answers_to(port, data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    whole = request("POST", PATH, BODY, JSON).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert parsed(await answers_to(port, whole))[1]["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/ping", "/v1/models", "/metrics"])
async def test_a_head_is_that_of_the_answer_without_its_body(port: int, path: str) -> None:
    head, _, body = (await answers_to(port, request("HEAD", path, b"", CLOSE))).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-length: " in head
    assert body == b""


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        (JSON + "content-encoding: identity\r\n", BODY),
        (JSON + "accept: application/xml\r\n", BODY),
        (JSON + "expect: 100-continue\r\n", BODY),
        ("content-type: APPLICATION/JSON ; charset=utf-8\r\n", BODY),
        (JSON, b"\xef\xbb\xbf" + BODY),
    ],
)
async def test_what_is_odd_and_legal_is_served(port: int, headers: str, content: bytes) -> None:
    told = await answers_to(port, request("POST", PATH, content, headers + CLOSE))
    told = told.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert parsed(told)[0] == 200


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (
            request("POST", PATH, gzip.compress(BODY), JSON + "content-encoding: gzip\r\n"),
            400,
            "Content-Encoding",
        ),
        (request("POST", PATH, BODY), 400, "Content-Type: application/json"),
        (request("POST", PATH, BODY, "content-type: text/plain\r\n"), 400, "Content-Type"),
        (request("POST", PATH + "/", BODY, JSON), 404, PATH + "/"),
        (request("OPTIONS", PATH), 405, "OPTIONS"),
        (request("GET", PATH), 405, "GET"),
        (request("POST", PATH, b"null", JSON), 400, "JSON object"),
    ],
)
async def test_what_is_not_served_is_refused_with_the_remedy(
    port: int, data: bytes, status: int, words: str
) -> None:
    told = await answers_to(port, data.replace(b"host: x\r\n", b"host: x\r\n" + CLOSE.encode()))
    assert parsed(told)[0] == status
    assert words in parsed(told)[1]["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"what is this\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST /x HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_is_told_in_openais_shape(port: int, data: bytes) -> None:
    status, answer = parsed(await answers_to(port, data))
    assert status in (400, 404)
    assert answer["error"]["type"] == "invalid_request_error"


async def test_no_refusal_is_written_into_an_answer_under_way() -> None:
    client = FakeEngineClient(reply=lambda request, index: "ok" * 50, delay_s=0.02)
    async with running_frontend(client) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        body = BODY[:-1].replace(b'"max_tokens": 4', b'"max_tokens": 100, "stream": true') + b"}"
        writer.write(request("POST", PATH, body, JSON))
        told = await reader.readuntil(b"data: ")
        writer.write(b"what is this\r\n\r\n")
        async with asyncio.timeout(30):
            told += await reader.read()
        writer.close()
    assert told.count(b"HTTP/1.1") == 1
