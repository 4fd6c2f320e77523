"""Bytes that are no message are the caller's mistake: a status that says so, and no traceback."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from pagewire_engine.service import EngineServer
from tests.fakes.fake_engine import build_fake_engine, fake_config
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend

NO_MESSAGE = b"\xff" * 10


async def _ask(channel: Any, method: str, kind: str) -> None:
    call = getattr(channel, kind)(method)
    if kind == "unary_unary":
        await call(NO_MESSAGE, timeout=10)
    elif kind == "unary_stream":
        async for _ in call(NO_MESSAGE, timeout=10):
            pass
    else:
        async for _ in call(iter([NO_MESSAGE]), timeout=10):
            pass


async def _refused(port: int, method: str, kind: str) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _ask(channel, method, kind)
    return refused.value


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/pagewire.v1.Inference/Tokenize", "unary_unary"),
        ("/pagewire.v1.Inference/GenerateUnary", "unary_unary"),
        ("/pagewire.v1.Inference/Chat", "unary_stream"),
        ("/pagewire.v1.Observability/WatchStats", "unary_stream"),
        ("/grpc.health.v1.Health/Check", "unary_unary"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_the_frontend_says_so(
    caplog: pytest.LogCaptureFixture, method: str, kind: str
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_frontend(FakeEngineClient()) as server:
            error = await _refused(server.grpc_port, method, kind)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message" in (error.details() or "")
    assert not caplog.records


@pytest.mark.parametrize("method", ["GetModelInfo", "Submit"])
async def test_the_engine_says_so(caplog: pytest.LogCaptureFixture, method: str) -> None:
    config = fake_config()
    server = EngineServer(build_fake_engine(config), config)
    port = server.start()
    try:
        with caplog.at_level(logging.WARNING):
            error = await _refused(port, f"/pagewire.v1.Engine/{method}", "unary_unary")
    finally:
        server.stop()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message" in (error.details() or "")
    assert not caplog.records
