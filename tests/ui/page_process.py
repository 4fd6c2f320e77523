"""The chat page as a process, and a reverse proxy in front of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.ports import free_port


@contextmanager
def page_process(frontend_port: int, *flags: str, **environment: str) -> Iterator[str]:
    """Runs the page; the value is its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire_ui.cli", f"--frontend=127.0.0.1:{frontend_port}",
         f"--port={port}", "--log-level=warning", *flags],
        env=os.environ | environment,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/"
    deadline = time.monotonic() + 180
    try:
        while True:
            try:
                urllib.request.urlopen(url, timeout=30).close()
                break
            except OSError:
                assert process.poll() is None, "the page ended at start"
                assert time.monotonic() < deadline, "the page did not start"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        status = process.wait(timeout=60)
    assert status == 0


@contextmanager
def reverse_proxy(target: str, prefix: str) -> Iterator[str]:
    """Shows the target under a prefix, which it takes off, as nginx would; its address there."""
    client = httpx.AsyncClient(base_url=target, timeout=None)

    async def forward(request: Request) -> Response:
        path = "/" + request.path_params["path"]
        query = f"?{request.url.query}" if request.url.query else ""
        headers = [(name, value) for name, value in request.headers.items() if name != "host"]
        headers += [("x-forwarded-host", request.headers["host"]), ("x-forwarded-proto", "http")]
        sent = client.build_request(
            request.method, path + query, headers=headers, content=await request.body()
        )
        answer = await client.send(sent, stream=True)
        response = StreamingResponse(answer.aiter_raw(), answer.status_code)
        response.raw_headers = [
            pair for pair in answer.headers.raw if pair[0].lower() != b"transfer-encoding"
        ]
        return response

    @asynccontextmanager
    async def closed_at_the_end(_: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    methods = ["GET", "HEAD", "POST"]
    app = Starlette(
        routes=[Route(prefix + "/{path:path}", forward, methods=methods)],
        lifespan=closed_at_the_end,
    )
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}{prefix}/"
    finally:
        server.should_exit = True
        thread.join(20)
