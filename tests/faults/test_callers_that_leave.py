"""Whoever leaves, or whose time is over, while a request waits or runs: the engine works no more
for it, however it was asked, and its blocks come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import httpx
import pytest

from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.e2e.wire_peer import WirePeer, wait_until_async
from tests.fakes.fake_engine import FakeEngineProcess
from tests.fakes.real_processes import RealFrontend

MAX_TOKENS = 3000
Ask = Callable[[RealFrontend, float | None], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def engine() -> Any:
    # One at a time runs; those after it wait.
    with FakeEngineProcess({"max_num_seqs": 1}, step_time_s=0.01) as running:
        yield running


@pytest.fixture(scope="module")
def frontend(engine: FakeEngineProcess) -> Any:
    with RealFrontend(engine.target) as running:
        yield running


@contextlib.asynccontextmanager
async def stub_of(frontend: RealFrontend) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(
        frontend.grpc.replace("localhost", "127.0.0.1")
    ) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def generate_request() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(1, 40)),
        sampling_params=sampling_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
    )


async def http(frontend: RealFrontend, deadline_s: float | None, *, stream: bool) -> None:
    address = frontend.http.replace("localhost", "127.0.0.1")
    body = {
        "model": "fake",
        "prompt": list(range(1, 40)),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": stream,
    }
    async with (
        httpx.AsyncClient(base_url=address, timeout=None) as client,
        asyncio.timeout(deadline_s),
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_bytes():
            pass


async def http_unary(frontend: RealFrontend, deadline_s: float | None) -> None:
    await http(frontend, deadline_s, stream=False)


async def http_stream(frontend: RealFrontend, deadline_s: float | None) -> None:
    await http(frontend, deadline_s, stream=True)


async def grpc_unary(frontend: RealFrontend, deadline_s: float | None) -> None:
    async with stub_of(frontend) as stub:
        await stub.GenerateUnary(generate_request(), timeout=deadline_s)


async def grpc_stream(frontend: RealFrontend, deadline_s: float | None) -> None:
    async with stub_of(frontend) as stub:
        async for _ in stub.Generate(generate_request(), timeout=deadline_s):
            pass


@pytest.mark.parametrize("by", ["leaving", "deadline"])
@pytest.mark.parametrize("ask", [http_unary, http_stream, grpc_unary, grpc_stream])
async def test_nothing_goes_on_working_for_a_caller_that_left(
    engine: FakeEngineProcess, frontend: RealFrontend, ask: Ask, by: str
) -> None:
    with WirePeer(engine.target) as peer:

        def at_work() -> bool:
            stats = peer.stats()
            return stats.num_running == 1 and stats.num_waiting == 2

        # A busy machine may need longer for it than the first deadlines.
        for deadline_s in (1.0, 3.0, 12.0) if by == "deadline" else (None,):
            # The second waits for the first, and the third has no place in the batch either.
            calls = [asyncio.create_task(ask(frontend, deadline_s)) for _ in range(3)]
            await wait_until_async(
                lambda calls=calls: at_work() or all(call.done() for call in calls),  # type: ignore[misc]  # default
                "one runs and two wait",
            )
            if at_work():
                break
        else:
            raise AssertionError("their time was over before one ran and two waited")
        if by == "leaving":
            for call in calls:
                call.cancel()
        ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert all(isinstance(end, BaseException) for end in ends)

        def at_rest() -> bool:
            stats = peer.stats()
            return stats.num_running + stats.num_waiting == 0 and peer.num_held_blocks() == 0

        await wait_until_async(at_rest, "the engine works for nobody")
        # None of them had come to its end by itself.
        tokens = peer.stats().num_generation_tokens
        await asyncio.sleep(0.1)
        assert peer.stats().num_generation_tokens == tokens
        assert frontend.alive
