"""A full queue, a deadline in it, priority and tenants, over real sockets from client to engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_pb2
from pagewire_engine.step import StepPlan
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine import FakeEngine, fake_config
from tests.fakes.frontend import grpc_stub


@asynccontextmanager
async def served(
    on_execute: Callable[[StepPlan], None] | None = None, **config: Any
) -> AsyncIterator[tuple[FakeEngine, FrontendServer, httpx.AsyncClient]]:
    """An engine that runs one sequence at a time, and a frontend that knows no text."""
    settings = fake_config(**({"max_num_seqs": 1} | config))
    with FakeEngine(settings, step_time_s=0.05, on_execute=on_execute) as engine:
        server = FrontendServer(
            FrontendConfig(
                engine=engine.target,
                http_port=0,
                grpc_port=0,
                grace_period_s=0.0,
                allow_high_priority=True,
            )
        )
        await server.start()
        try:
            base_url = f"http://127.0.0.1:{server.http_port}"
            async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
                yield engine, server, http
        finally:
            await server.stop()


def body(max_tokens: int = 1000, **fields: Any) -> dict[str, Any]:
    return {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, **fields}


async def post(
    http: httpx.AsyncClient, key: str = "", max_tokens: int = 1000, **fields: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await http.post("/v1/completions", json=body(max_tokens, **fields), headers=headers)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the engine is on other threads
            await asyncio.sleep(0.01)


def waiting(engine: FakeEngine) -> int:
    return engine.built.engine.stats().num_waiting


def live(engine: FakeEngine) -> int:
    """Requests that wait or run, once all that can start has started."""
    stats = engine.built.engine.stats()
    if stats.num_waiting and stats.num_running < engine.config.max_num_seqs:
        return -1
    return stats.num_waiting + stats.num_running


def request(max_tokens: int = 1000, **fields: Any) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(**fields)
    message.token_ids.ids.extend([5, 6, 7])
    message.sampling_params.max_tokens = max_tokens
    message.sampling_params.ignore_eos = True
    return message


@asynccontextmanager
async def in_flight(*works: Any) -> AsyncIterator[Callable[[Any], None]]:
    """Runs calls, and more that are handed to what it yields, until the end of the block."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield lambda work: tasks.append(asyncio.ensure_future(work))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
    return float(retry.retry_delay.ToMilliseconds() / 1000)


async def test_a_full_queue_is_429_with_retry_after_and_resource_exhausted_with_retry_info() -> (
    None
):
    async with (
        served(max_waiting_requests=2) as (engine, server, http),
        grpc_stub(server) as stub,
        in_flight() as fly,
    ):
        for count in range(3):
            fly(post(http))
            await until(lambda count=count: live(engine) == count + 1)  # type: ignore[misc]  # default
        response = await post(http)
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert "2 requests wait already" in response.json()["error"]["message"]
        assert (await post(http, stream=True)).status_code == 429
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 1 <= _retry_after_s(caught.value) <= 60


async def test_a_flood_under_one_key_neither_shuts_out_nor_holds_up_another() -> None:
    async with (
        served(max_waiting_requests=4, max_num_seqs=2) as (engine, server, http),
        grpc_stub(server) as stub,
        in_flight() as fly,
    ):
        for count in range(6):
            fly(post(http, "big"))
            await until(lambda count=count: live(engine) == count + 1)  # type: ignore[misc]  # default
        assert (await post(http, "big")).status_code == 429
        # It gets a place at once, though four wait and two have a thousand tokens, 50 s, to go.
        async with asyncio.timeout(40):
            assert (await post(http, "small", max_tokens=2)).status_code == 200
            metadata = (("authorization", "Bearer small"),)
            answer = await stub.GenerateUnary(request(max_tokens=2), metadata=metadata)
        assert list(answer.outputs[0].token_ids)


async def test_what_waits_too_long_is_deadline_exceeded() -> None:
    async with (
        served(max_queue_time_s=1.2) as (engine, server, http),
        grpc_stub(server) as stub,
        in_flight(post(http)),
    ):
        await until(lambda: engine.built.engine.stats().num_running == 1)
        response = await post(http)
        assert response.status_code == 504
        assert "1.2 s" in response.json()["error"]["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(request())
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "1.2 s" in (caught.value.details() or "")
        assert 1 <= _retry_after_s(caught.value) <= 60
        assert engine.built.engine.stats().num_running == 1


async def test_a_clients_own_deadline_takes_its_request_out_of_the_queue() -> None:
    async with (
        served() as (engine, server, http),
        grpc_stub(server) as stub,
        in_flight(post(http)),
    ):
        await until(lambda: engine.built.engine.stats().num_running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(request(), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: waiting(engine) == 0)


async def test_priority_reaches_the_engine_over_http_and_grpc() -> None:
    # By the number of tokens they ask for, in the order in which the engine starts them.
    started: list[int | None] = []

    def note(plan: StepPlan) -> None:
        started.extend(new.sampling_params.max_tokens for new in plan.new_sequences)

    async with (
        served(on_execute=note) as (engine, server, http),
        grpc_stub(server) as stub,
    ):
        first = asyncio.create_task(post(http))
        await until(lambda: live(engine) == 1)
        calls = []
        for work in (
            lambda: post(http, max_tokens=4, priority=5),
            lambda: stub.GenerateUnary(request(max_tokens=3, priority=3)),
            lambda: post(http, max_tokens=2, priority=-1),
        ):
            calls.append(asyncio.ensure_future(work()))
            await until(lambda: waiting(engine) == len(calls))
        first.cancel()
        await asyncio.gather(*calls)
    assert started == [1000, 2, 3, 4]
