"""Requests made from /openapi.json: the document is true, and none of them breaks the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

from pagewire.pooling import PoolingInfo, Task
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving, running_frontend


@contextmanager
def served(client: FakeEngineClient) -> Iterator[str]:
    """The address of a frontend over a scripted engine, on a thread of its own."""
    started: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
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


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with served(FakeEngineClient(tokens_a_step=4)) as url:
        yield url


@pytest.fixture(scope="module", params=["embeds", "classifies"])
def pooling_url(request: pytest.FixtureRequest) -> Iterator[str]:
    client = FakeEngineClient(tasks=(Task.EMBED, Task.SCORE), pooling=PoolingInfo(8))
    if request.param == "classifies":
        labels = ("relevant",)
        tasks = (Task.CLASSIFY, Task.SCORE)
        client = FakeEngineClient(tasks=tasks, pooling=PoolingInfo(1, labels=labels))
    with served(client) as url:
        yield url


async def document() -> dict[str, Any]:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        found: dict[str, Any] = (await http.get("/openapi.json")).json()
        return found


CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_dict(asyncio.run(document()))


@schema.parametrize()
@settings(max_examples=8)
def test_requests_of_every_kind_are_answered_as_described(
    case: schemathesis.Case, base_url: str
) -> None:
    case.call_and_validate(base_url=base_url, checks=CHECKS, timeout=60)


@schema.include(
    path_regex="^/(v[12]/)?(embeddings|pooling|classify|score|rerank|tokenize)$"
).parametrize()
@settings(max_examples=4)
def test_requests_for_vectors_are_answered_by_models_that_pool(
    case: schemathesis.Case, pooling_url: str
) -> None:
    case.call_and_validate(base_url=pooling_url, checks=CHECKS, timeout=60)


async def test_every_route_is_in_the_document() -> None:
    paths = (await document())["paths"]
    for path in ("/v1/responses", "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score",
                 "/rerank", "/v1/rerank", "/v2/rerank",
                 "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):  # fmt: skip
        assert "post" in paths[path]
    assert set(paths["/v1/responses/{response_id}"]) == {"get", "delete"}
