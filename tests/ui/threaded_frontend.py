"""The frontend itself, over a scripted engine client, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend


@contextmanager
def threaded_frontend(client: FakeEngineClient, **config: Any) -> Iterator[int]:
    """Serves as long as the context is open; its value is the gRPC port."""
    started, done = threading.Event(), threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        async with running_frontend(client, **config) as server:
            ports.append(server.grpc_port)
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(120), "the frontend did not start"
        yield ports[0]
    finally:
        done.set()
        thread.join(120)
