"""The HTTP server stops listening while file descriptors are short, and begins again as a whole."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pagewire import descriptors
from pagewire.descriptors import spare_descriptors
from pagewire.listening import open_socket
from pagewire_frontend import http_server
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.http_server import HttpServer


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Listening:
    """A server on two ports; its count of descriptors is what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spare, self.failing, self.tried = 1000, False, 0
        self.tried_often = asyncio.Event()
        self.sockets = [open_socket(socket.AF_INET, "127.0.0.1", 0) for _ in range(2)]
        self.ports = [each.getsockname()[1] for each in self.sockets]
        self.server = HttpServer(answer, FrontendConfig(), list(self.sockets), None)
        monkeypatch.setattr(http_server, "_COUNT_INTERVAL_S", 0.01)
        monkeypatch.setattr(http_server, "spare_descriptors", lambda: self.spare)

    async def taken(self) -> list[bool]:
        """Whether each port takes connections."""
        return [await _is_taken(port) for port in self.ports]

    async def until(self, expected: list[bool]) -> None:
        async with asyncio.timeout(30):
            while await self.taken() != expected:  # noqa: ASYNC110  # what a client sees
                await asyncio.sleep(0.01)

    def fail_on_the_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the two that are to be listened on again, the second can't be."""
        make = asyncio.get_running_loop().create_server

        async def create_server(protocol: Callable[[], Any], **options: Any) -> asyncio.Server:
            if self.failing and options["sock"].getsockname()[1] == self.ports[1]:
                self.tried += 1
                if self.tried == 20:
                    self.tried_often.set()
                raise OSError("no buffers")
            return await make(protocol, **options)

        monkeypatch.setattr(asyncio.get_running_loop(), "create_server", create_server)


async def _is_taken(port: int) -> bool:
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return b"204" in await asyncio.wait_for(reader.read(), 0.2)
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()


@pytest.fixture
async def listening(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listening]:
    each = Listening(monkeypatch)
    await each.server.start()
    yield each
    await each.server.stop(0)


async def test_where_one_port_can_not_be_had_none_is_and_all_are_tried_again(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    await listening.until([True, True])
    listening.fail_on_the_second(monkeypatch)
    listening.failing, listening.spare = True, 0
    await listening.until([False, False])
    open_then = len(os.listdir("/proc/self/fd"))
    listening.spare = 1000
    await asyncio.wait_for(listening.tried_often.wait(), 30)
    # Each try would have left two more.
    assert len(os.listdir("/proc/self/fd")) < open_then + 20
    listening.failing = False
    await listening.until([True, True])


async def test_a_stop_while_it_begins_to_listen_leaves_nothing_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening = Listening(monkeypatch)
    await listening.server.start()
    listening.spare = 0
    await listening.until([False, False])
    begun = asyncio.Event()
    make = asyncio.get_running_loop().create_server

    async def create_server(protocol: Callable[[], Any], **options: Any) -> asyncio.Server:
        server = await make(protocol, **options)
        if server.sockets[0].getsockname()[1] == listening.ports[1]:
            begun.set()
            await asyncio.Event().wait()
        return server

    monkeypatch.setattr(asyncio.get_running_loop(), "create_server", create_server)
    listening.spare = 1000
    await asyncio.wait_for(begun.wait(), 30)
    await listening.server.stop(0)
    assert await listening.taken() == [False, False]
    # Nobody holds the ports any more.
    for port in listening.ports:
        open_socket(socket.AF_INET, "127.0.0.1", port).close()


def test_descriptors_are_counted_alike_with_and_without_the_kernels_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = spare_descriptors()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    try:
        assert abs(told - spare_descriptors() - 100) < 20
        monkeypatch.setattr(descriptors.os, "stat", lambda path: os.stat_result([0] * 10))
        assert abs(told - spare_descriptors() - 100) < 20
    finally:
        for each in opened:
            os.close(each)
