"""The SSE response: comments in silence, errors, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.errors import InvalidArgumentError, UnavailableError
from pagewire_frontend.openai_api.event_stream import Emit, EventStream, unless_disconnected
from pagewire_frontend.shutdown import Shutdown


class Connection:
    """One client's end of an ASGI connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.chunks: list[bytes] = []
        self.complete = False
        self.started = asyncio.Event()
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        assert not self.complete
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
            return
        assert self.status
        self.chunks.append(message["body"])
        self.started.set()
        self.complete = not message.get("more_body", False)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


class Server:
    """An EventStream under test, and whether it was cleaned up."""

    def __init__(self, *writers: Callable[[Emit], Any], keepalive_s: float = 60.0) -> None:
        self.cleaned_up = 0
        self.stream = EventStream(
            writers, lambda: b"data: usage\n\n", self._clean_up, keepalive_s, Shutdown()
        )

    async def _clean_up(self) -> None:
        self.cleaned_up += 1

    async def serve(self, connection: Connection) -> None:
        await asyncio.wait_for(
            self.stream({"type": "http"}, connection.receive, connection.send), 30
        )


async def test_events_come_as_they_are_emitted_and_end_with_done() -> None:
    async def write(emit: Emit) -> None:
        await emit(b"data: 1\n\n")
        await emit(b"data: 2\n\n")

    connection, server = Connection(), Server(write)
    await server.serve(connection)
    assert connection.status == 200
    assert connection.headers[b"content-type"].startswith(b"text/event-stream")
    assert connection.chunks == [
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"data: usage\n\ndata: [DONE]\n\n",
        b"",
    ]
    assert connection.complete
    assert server.cleaned_up == 1


async def test_silence_is_filled_with_comments() -> None:
    connection = Connection()

    async def write(emit: Emit) -> None:
        while len(connection.chunks) < 2:  # noqa: ASYNC110  # any chunk, none of them ours
            await asyncio.sleep(0.01)
        await emit(b"data: 1\n\n")

    server = Server(write, keepalive_s=0.05)
    await server.serve(connection)
    assert connection.status == 200
    assert connection.body.startswith(b": keep-alive\n\n: keep-alive\n\ndata: 1")


async def test_no_comments_while_events_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()

    async def write(emit: Emit) -> None:
        nonlocal now
        for _ in range(20):
            await emit(b"data: 1\n\n")
            now += 0.1
            for _ in range(5):  # time for whoever has slept until now
                await asyncio.sleep(0)

    connection = Connection()
    with monkeypatch.context() as clock:
        clock.setattr(loop, "time", lambda: now)
        server = Server(write, keepalive_s=0.15)
        await server.serve(connection)
    assert b"keep-alive" not in connection.body
    assert connection.body.count(b"data: 1") == 20


async def test_an_error_before_the_first_event_is_an_ordinary_response() -> None:
    async def write(emit: Emit) -> None:
        raise InvalidArgumentError("prompt", "does not fit in the pool")

    connection, server = Connection(), Server(write)
    await server.serve(connection)
    assert connection.status == 400
    assert connection.headers[b"content-type"] == b"application/json"
    assert b'"param":"prompt"' in connection.body
    assert server.cleaned_up == 1


async def test_an_error_after_the_first_event_is_an_event() -> None:
    async def write(emit: Emit) -> None:
        await emit(b"data: 1\n\n")
        raise UnavailableError("the engine is gone")

    connection, server = Connection(), Server(write)
    await server.serve(connection)
    assert connection.status == 200
    assert connection.body.startswith(b'data: 1\n\ndata: {"error":{"message":"the engine is gone"')
    assert connection.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert b"usage" not in connection.body


async def test_one_failing_writer_ends_the_others() -> None:
    ended = []

    async def fails(emit: Emit) -> None:
        await emit(b"data: 1\n\n")
        raise UnavailableError("gone")

    async def waits(emit: Emit) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    server = Server(fails, waits)
    await server.serve(Connection())
    assert ended == [True]
    assert server.cleaned_up == 1


async def test_a_client_that_leaves_ends_all_writers() -> None:
    ended = []

    async def waits(emit: Emit) -> None:
        await emit(b"data: 1\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    connection, server = Connection(), Server(waits, waits)
    serving = asyncio.create_task(server.serve(connection))
    await connection.started.wait()
    connection.left.set()
    await serving
    assert ended == [True, True]
    assert server.cleaned_up == 1
    assert not connection.complete


async def test_a_cancelled_stream_cleans_up() -> None:
    async def waits(emit: Emit) -> None:
        await asyncio.Event().wait()

    server = Server(waits)
    serving = asyncio.create_task(server.serve(Connection()))
    await asyncio.sleep(0.01)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert server.cleaned_up == 1


async def test_work_is_cancelled_when_the_client_leaves_first() -> None:
    cancelled = []

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return "never"

    connection = Connection()
    waiting = asyncio.create_task(unless_disconnected(connection.receive, work()))
    await asyncio.sleep(0.01)
    connection.left.set()
    assert await waiting is None
    assert cancelled == [True]


async def test_work_gives_its_result_or_its_error() -> None:
    async def good() -> str:
        return "done"

    async def bad() -> str:
        raise UnavailableError("gone")

    assert await unless_disconnected(Connection().receive, good()) == "done"
    with pytest.raises(UnavailableError):
        await unless_disconnected(Connection().receive, bad())
