"""Requests made from /openapi.json: the document is true, and none of them breaks the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving, running_frontend


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A frontend over a scripted engine, on a thread of its own."""
    started: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        client = FakeEngineClient(tokens_a_step=4)
        async with running_frontend(client, response_store=1_000_000) as server:
            started.append(f"http://127.0.0.1:{server.http_port}")
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield started[0]
    stop.set()
    thread.join(60)


async def document() -> dict[str, Any]:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        found: dict[str, Any] = (await http.get("/openapi.json")).json()
        return found


schema = schemathesis.openapi.from_dict(asyncio.run(document()))


@schema.parametrize()
@settings(max_examples=8)
def test_requests_of_every_kind_are_answered_as_described(
    case: schemathesis.Case, base_url: str
) -> None:
    case.call_and_validate(
        base_url=base_url,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
        timeout=60,
    )
