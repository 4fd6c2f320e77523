"""What the supervisor's probes make of servers that serve, idle, work, stall and vanish."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire.v1 import engine_pb2, engine_pb2_grpc
from pagewire_frontend import probes
from pagewire_frontend.probes import ENGINE_SERVICE, GrpcProbe


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Answers GetStats with what it was told."""

    def __init__(self) -> None:
        self.stats = engine_pb2.GetStatsResponse(epoch=1, step=5)

    async def GetStats(
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_pb2.GetStatsResponse]:
        yield self.stats


@pytest.fixture
async def server() -> AsyncIterator[tuple[ScriptedEngine, Any, str]]:
    engine, health_servicer = ScriptedEngine(), health.aio.HealthServicer()
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield engine, health_servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_health_follows_the_server(server: tuple[ScriptedEngine, Any, str]) -> None:
    _, health_servicer, target = server
    probe = GrpcProbe(target)
    assert not await probe.is_serving(ENGINE_SERVICE)  # not known yet
    await health_servicer.set(ENGINE_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert await probe.is_serving(ENGINE_SERVICE)
    await health_servicer.set(ENGINE_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not await probe.is_serving(ENGINE_SERVICE)
    await probe.close()


async def test_only_an_engine_that_should_step_can_stall(
    server: tuple[ScriptedEngine, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, target = server
    clock = [100.0]
    monkeypatch.setattr(probes.time, "monotonic", lambda: clock[0])
    probe = GrpcProbe(target)

    async def after(seconds: float, **stats: int) -> float:
        clock[0] += seconds
        engine.stats.MergeFrom(engine_pb2.GetStatsResponse(**stats))  # type: ignore[arg-type]  # ints
        return await probe.engine_stalled_s()

    assert await after(0) == 0
    assert await after(50) == 0  # idle
    assert await after(50, num_running=1) == 0  # it has just begun
    assert await after(50) == 50
    assert await after(50) == 100
    assert await after(50, step=6) == 0
    assert await after(50) == 50
    assert await after(50, epoch=2) == 0  # a new engine on the same port
    await probe.close()


async def test_an_engine_that_is_gone_raises() -> None:
    probe = GrpcProbe("127.0.0.1:1")
    assert not await probe.is_serving()
    with pytest.raises(grpc.aio.AioRpcError):
        await probe.engine_stalled_s()
    await probe.close()
