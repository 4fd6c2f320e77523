"""Clients that send without end, or hardly at all: they are cut off, and others are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from pagewire_frontend.openai_api.http_protocol import MAX_HEAD_BYTES
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend

TIMEOUT_S = 0.6
BODY = b'{"prompt": "hi", "max_tokens": 4}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


@pytest.fixture
async def server() -> AsyncIterator[FrontendServer]:
    async with running_frontend(FakeEngineClient(), request_read_timeout_s=TIMEOUT_S) as running:
        yield running


@pytest.fixture
async def patient() -> AsyncIterator[FrontendServer]:
    """For requests that are bad, or good, whatever time they take."""
    async with running_frontend(FakeEngineClient(), request_read_timeout_s=60.0) as running:
        yield running


async def connect(server: FrontendServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.http_port)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes."""
    try:
        return await asyncio.wait_for(reader.read(), 40)
    except ConnectionResetError:
        return b""


async def trickle(writer: asyncio.StreamWriter, byte: bytes) -> None:
    while not writer.is_closing():
        writer.write(byte)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("begin", "byte"),
    [
        (b"GET /health HTTP/1.1\r\nx-slow: ", b"a"),
        (HEAD % 10_000 + b'{"prompt": "', b"a"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nx-slow: ", b"a"),
    ],
    ids=["head", "body", "second head"],
)
async def test_a_request_that_trickles_is_answered_408_and_cut_off(
    server: FrontendServer, begin: bytes, byte: bytes
) -> None:
    reader, writer = await connect(server)
    writer.write(begin)
    trickling = asyncio.create_task(trickle(writer, byte))
    started = time.monotonic()
    answer = await rest(reader)
    trickling.cancel()
    assert b"HTTP/1.1 408 Request Timeout" in answer
    assert b"did not come within" in answer
    assert time.monotonic() - started > TIMEOUT_S / 2
    writer.close()


@pytest.mark.parametrize("begin", [b"", b"\r\n"])
async def test_a_connection_that_never_asks_is_closed(server: FrontendServer, begin: bytes) -> None:
    reader, writer = await connect(server)
    writer.write(begin)
    await rest(reader)
    assert reader.at_eof()
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"x-many: 1234567890\r\n" * (MAX_HEAD_BYTES // 10),
        b"GET /health HTTP/1.1\r\nx-long: " + b"a" * (4 * MAX_HEAD_BYTES),
        b"GET /" + b"a" * (4 * MAX_HEAD_BYTES),
    ],
    ids=["many", "long", "url"],
)
async def test_a_head_without_end_is_answered_431(patient: FrontendServer, head: bytes) -> None:
    reader, writer = await connect(patient)

    async def send() -> None:
        for at in range(0, len(head), 8192):
            writer.write(head[at : at + 8192])
            await writer.drain()
            await asyncio.sleep(0.001)

    sending = asyncio.create_task(send())
    answer = await rest(reader)
    await asyncio.wait({sending})
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    assert reader.at_eof() or not answer
    writer.close()


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    "endless",
    [
        b"0\r\n" + b"x-many: 1234567890\r\n" * (MAX_HEAD_BYTES // 4),
        b"0\r\nx-long: " + b"a" * (20 * MAX_HEAD_BYTES),
        b"1;x=" + b"a" * (20 * MAX_HEAD_BYTES),
    ],
    ids=["trailers", "trailer", "chunk extension"],
)
async def test_trailers_and_chunk_extensions_without_end_are_answered_431(
    patient: FrontendServer, endless: bytes
) -> None:
    reader, writer = await connect(patient)
    writer.write(CHUNKED + b"%x\r\n%b\r\n" % (len(BODY), BODY))
    sent = 0

    async def send() -> None:
        nonlocal sent
        for at in range(0, len(endless), 8192):
            writer.write(endless[at : at + 8192])
            await writer.drain()
            sent += 8192
            await asyncio.sleep(0.001)

    sending = asyncio.create_task(send())
    answer = await rest(reader)
    await asyncio.wait({sending})
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    assert sending.exception() is not None, "it was not cut off"
    assert sent < len(endless)
    writer.close()


async def test_a_trailer_is_no_header() -> None:
    """The tenant is what the Authorization header says."""
    client = FakeEngineClient()
    async with running_frontend(client) as server:
        for trailer in (b"", b"authorization: Bearer someone\r\n"):
            reader, writer = await connect(server)
            body = b"%x\r\n%b\r\n" % (len(BODY), BODY)
            writer.write(CHUNKED + body + b"0\r\n" + trailer + b"\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 200 OK")
            writer.close()
    without, with_trailer = client.requests
    assert with_trailer.tenant == without.tenant


async def test_small_chunks_and_a_trailer_are_no_matter(patient: FrontendServer) -> None:
    """Their framing is longer than a head may be."""
    body = b" " * 20_000 + BODY
    reader, writer = await connect(patient)
    writer.write(CHUNKED)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert len(chunks) > MAX_HEAD_BYTES
    for at in range(0, len(chunks), 4096):
        writer.write(chunks[at : at + 4096])
        await writer.drain()
    writer.write(b"0\r\nx-trailer: a\r\n\r\n")
    assert (await rest(reader)).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_a_slow_but_steady_upload_is_served() -> None:
    """It takes longer than the timeout, and sends more than ten kilobytes a second."""
    timeout_s = 1.0
    body = b'{"max_tokens": 4, "prompt": "hi", "user": "' + b"a" * 100_000 + b'"}'
    async with running_frontend(FakeEngineClient(), request_read_timeout_s=timeout_s) as server:
        reader, writer = await connect(server)
        writer.write(HEAD.replace(b"host: x", b"host: x\r\nconnection: close") % len(body))
        started = time.monotonic()
        for at in range(0, len(body), 5_000):
            writer.write(body[at : at + 5_000])
            await writer.drain()
            await asyncio.sleep(0.08)
        assert time.monotonic() - started > 1.5 * timeout_s
        assert (await rest(reader)).startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_an_answer_may_take_longer_than_the_request_may() -> None:
    client = FakeEngineClient(reply=lambda request, index: "a" * 200, delay_s=0.01)
    async with running_frontend(client, request_read_timeout_s=0.3) as server:
        reader, writer = await connect(server)
        body = b'{"prompt": "hi", "max_tokens": 200, "stream": true}'
        writer.write(HEAD % len(body) + body)
        answer = await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 60)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        # The connection is kept alive, and a next request is served.
        writer.write(HEAD.replace(b"host: x", b"host: x\r\nconnection: close") % len(BODY) + BODY)
        assert b"HTTP/1.1 200 OK" in await rest(reader)
        writer.close()


async def test_others_are_served_beside_many_slow_ones(server: FrontendServer) -> None:
    slow = [await connect(server) for _ in range(50)]
    for _, writer in slow:
        writer.write(b"GET /health HTTP/1.1\r\n")
    reader, writer = await connect(server)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await rest(reader)).startswith(b"HTTP/1.1 200 OK")
    for _, other in slow:
        other.close()
    writer.close()
