"""The frontend for tests: over a scripted engine client, with sockets or without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx

from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.openai_api.app import create_app
from pagewire_frontend.server import FrontendServer
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import FakeEngineClient


async def make_serving(
    client: FakeEngineClient, *, allow_request_chat_template: bool = False, **config: Any
) -> Serving:
    """What both APIs stand on, without a server."""
    serving = Serving(FrontendConfig(**config))
    settings = GenerationSettings(allow_request_chat_template=allow_request_chat_template)
    serving.connect(await Generation.create(client, settings))
    return serving


def http_client(serving: Serving) -> httpx.AsyncClient:
    """Calls the HTTP API in this process. It reads whole responses only."""
    transport = httpx.ASGITransport(app=create_app(serving))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@asynccontextmanager
async def running_frontend(
    client: FakeEngineClient, **config: Any
) -> AsyncIterator[FrontendServer]:
    """A FrontendServer on free ports, stopped at the end."""
    settings = {"http_port": 0, "grpc_port": 0, "grace_period_s": 0.0, **config}
    server = FrontendServer(FrontendConfig(**settings), client)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def grpc_stub(server: FrontendServer) -> AsyncIterator[Any]:
    """An Inference stub on a connection of its own."""
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def chat_request(text: str = "hi", **fields: Any) -> inference_pb2.ChatRequest:
    """A ChatRequest with one user message."""
    message = inference_pb2.ChatMessage(role="user", content=[inference_pb2.ContentPart(text=text)])
    return inference_pb2.ChatRequest(messages=[message], **fields)


def sse_events(body: str) -> list[Any]:
    """The JSON of each `data:` event, `[DONE]` as that string; comments are left out."""
    events: list[Any] = []
    for block in body.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
