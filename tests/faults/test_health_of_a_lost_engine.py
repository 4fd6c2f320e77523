"""Health says NOT_SERVING while the engine is dead, stands still or does not end a step, and
SERVING again when it is back; the frontend itself lives all the while (vLLM's issue 39863)."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire_frontend.engine_client import session
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.server import FrontendServer
from tests.e2e.wire_peer import request
from tests.fakes.fake_engine import FakeEngine, FakeEngineProcess
from tests.fakes.frontend import running_frontend

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "pagewire.v1.Inference"


async def told(server: FrontendServer) -> tuple[int, int, int, int]:
    """/health, /health/live, and gRPC's of Inference and of the process."""
    url = f"http://127.0.0.1:{server.http_port}"
    async with (
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        statuses = [
            (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)).status
            for name in (INFERENCE, "")
        ]
        paths = ("/health", "/health/live")
        codes = [(await http.get(path)).status_code for path in paths]
    return codes[0], codes[1], statuses[0], statuses[1]


async def until_told(server: FrontendServer, wanted: tuple[int, int, int, int]) -> None:
    """gRPC's health is set anew now and then."""
    async with asyncio.timeout(120):
        while await told(server) != wanted:  # noqa: ASYNC110  # seen from outside alone
            await asyncio.sleep(0.05)


async def goes_and_comes(
    client: Any, lose: Callable[[], Any], bring_back: Callable[[], Any]
) -> None:
    async with running_frontend(client) as server:
        await until_told(server, (200, 200, SERVING, SERVING))
        stream = await client.submit(request(max_tokens=200))
        lose()
        await until_told(server, (503, 200, NOT_SERVING, SERVING))
        await asyncio.to_thread(bring_back)
        await until_told(server, (200, 200, SERVING, SERVING))
        tokens = [token async for deltas in stream for delta in deltas for token in delta.token_ids]
        assert len(tokens) == 200


@pytest.mark.parametrize(
    ("blow", "remedy"),
    [
        (signal.SIGKILL, lambda engine: engine.start()),
        pytest.param(
            signal.SIGSTOP,
            lambda engine: engine.signal(signal.SIGCONT),
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_process_that_is_dead_or_stands_still(
    blow: signal.Signals, remedy: Callable[[FakeEngineProcess], None]
) -> None:
    with FakeEngineProcess(step_time_s=0.005) as engine:
        client = RemoteEngineClient(engine.target, failover_window_s=240)
        await goes_and_comes(
            client,
            engine.kill if blow is signal.SIGKILL else lambda: engine.signal(blow),
            lambda: remedy(engine),
        )


async def test_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "STUCK_AFTER_S", 0.5)
    goes_on = threading.Event()
    goes_on.set()
    with FakeEngine(step_time_s=0.005, on_execute=lambda plan: goes_on.wait(60)) as engine:
        try:
            client = RemoteEngineClient(engine.target, failover_window_s=240)
            await goes_and_comes(client, goes_on.clear, goes_on.set)
        finally:
            goes_on.set()
