"""No request holds up the streams of others: what is computed between two tokens of a stream is
measured while bodies made to be expensive are refused or served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pagewire.v1 import inference_pb2
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import grpc_stub, running_frontend
from tests.fakes.yardstick import at_most

# Seconds of this process's own time, so that a busy machine does not count. Beside the loop the
# client's thread takes some; what these bodies cost without their bounds is between one and nine.
LONGEST_PAUSE_S = 0.6
ATTEMPTS = 3
USER = {"role": "user", "content": "a<"}
BODIES = {
    "detokenize": ("/detokenize", {"tokens": [65] * 900_000}, 200),
    "detokenize too many": ("/detokenize", {"tokens": [65] * 2_500_000}, 400),
    "a long text": ("/v1/completions", {"prompt": "ab " * 5_000_000}, 400),
    "a long chat": (
        "/v1/chat/completions",
        {"messages": [{**USER, "content": "ab " * 2_000_000}]},
        400,
    ),
    "tokenize": ("/tokenize", {"prompt": "ab " * 5_000_000}, 400),
    "token ids": ("/v1/completions", {"prompt": [65] * 1_000_000}, 400),
    "prompts": ("/v1/completions", {"prompt": [[65]] * 1_000_000}, 400),
    "logit_bias": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": dict.fromkeys(range(300_000), 1)},
        400,
    ),
    "stop": ("/v1/completions", {"prompt": "a", "stop": ["a"] * 3_000_000}, 400),
    "stop_token_ids": ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * 1_000_000}, 400),
    "messages": ("/v1/chat/completions", {"messages": [USER] * 9_000}, 400),
    "too many messages": ("/v1/chat/completions", {"messages": [USER] * 200_000}, 400),
}


class Pauses:
    """The longest pause between two tokens of a stream, in processor time of all threads, or by the
    clock if that is less: while two threads compute, each is paused for half of what they take."""

    def __init__(self) -> None:
        self.longest_s = 0.0


@asynccontextmanager
async def watched_stream(server: FrontendServer) -> AsyncIterator[Pauses]:
    """A stream of a token every few milliseconds, read all the while."""
    pauses = Pauses()
    started = asyncio.Event()

    async def read() -> None:
        request = inference_pb2.GenerateRequest(text="a")
        request.sampling_params.max_tokens = 50_000
        async with grpc_stub(server) as stub:
            last = (time.monotonic(), time.process_time())
            async for _ in stub.Generate(request):
                now = (time.monotonic(), time.process_time())
                pauses.longest_s = max(pauses.longest_s, min(now[0] - last[0], now[1] - last[1]))
                last = now
                started.set()

    reader = asyncio.create_task(read())
    try:
        await asyncio.wait_for(started.wait(), 60)
        pauses.longest_s = 0.0
        yield pauses
        assert not reader.done(), "the stream ended early"
    finally:
        reader.cancel()
        await asyncio.wait({reader})


def client() -> FakeEngineClient:
    return FakeEngineClient(
        reply=lambda request, index: "a" * 50_000, delay_s=0.003, max_model_len=60_000
    )


@pytest.mark.parametrize(("path", "body", "status"), BODIES.values(), ids=BODIES)
async def test_an_expensive_body_does_not_hold_up_another_stream(
    path: str, body: dict[str, Any], status: int
) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    # The machine's own pauses come and go; a stall comes each time.
    shortest_s = float("inf")
    for _ in range(ATTEMPTS):
        async with running_frontend(client()) as server, watched_stream(server) as pauses:
            url = f"http://127.0.0.1:{server.http_port}{path}"
            response = await asyncio.to_thread(
                httpx.post, url, content=data, headers=headers, timeout=60
            )
            assert response.status_code == status, response.text[:300]
        shortest_s = min(shortest_s, pauses.longest_s)
        if shortest_s < at_most(LONGEST_PAUSE_S):
            return
    raise AssertionError(f"the stream stood still for {shortest_s:.2f} s")
