"""Questions a supervisor asks its children: are you ready, do you make progress?"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import engine_pb2, engine_pb2_grpc

PROBE_TIMEOUT_S = 5.0
ENGINE_SERVICE = "pagewire.v1.Engine"
INFERENCE_SERVICE = "pagewire.v1.Inference"

# Loopback: no proxy, and no long pauses between attempts while a child is starting.
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


async def http_get(
    connecting: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    path: str,
    *,
    host: str = "localhost",
    timeout_s: float = PROBE_TIMEOUT_S,
) -> bytes:
    """What is answered to a GET.

    Args:
        connecting: to the server; the connection is for this question alone.
        path: what is asked for.
        host: as the server knows itself.
        timeout_s: for all of it.

    Raises:
        OSError: nothing, or not with status 200.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await connecting
        try:
            request = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
            writer.write(request.encode())
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise OSError(f"{head[:40]!r} was answered to {path}")
    return body


async def http_answers(host: str, port: int, path: str) -> bool:
    """Whether GET `path` is answered with status 200."""
    try:
        await http_get(asyncio.open_connection(host, port), path, host=host)
    except OSError:
        return False
    return True


class GrpcProbe:
    """Asks one server over a channel that is kept open."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: grpc.aio.Channel | None = None
        self._progress: tuple[tuple[int, ...], float] = ((), 0.0)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._open is None:  # made in the loop that uses it
            self._open = grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        return self._open

    async def is_serving(self, service: str = "") -> bool:
        """Whether grpc.health.v1 says SERVING for `service`."""
        stub = health_pb2_grpc.HealthStub(self._channel)  # type: ignore[no-untyped-call]  # untyped
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def engine_stalled_s(self) -> float:
        """For how many seconds an engine with requests to run has made no step.

        Raises:
            grpc.aio.AioRpcError: it does not answer at all.
        """
        stub = engine_pb2_grpc.EngineStub(self._channel)
        call = stub.GetStats(engine_pb2.GetStatsRequest(), timeout=PROBE_TIMEOUT_S)
        stats = await call.read()
        call.cancel()
        now = time.monotonic()
        if not isinstance(stats, engine_pb2.GetStatsResponse):  # the end of the stream
            return 0.0
        busy = stats.num_running + stats.num_waiting + stats.num_swapped > 0
        mark = (stats.epoch, stats.step, int(busy))
        if not busy or mark != self._progress[0]:
            self._progress = (mark, now)
        return now - self._progress[1]

    async def close(self) -> None:
        """Closes the channel."""
        if self._open is not None:
            await self._open.close(None)
            self._open = None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m pagewire_frontend.probes HOST:PORT [SERVICE]`: a container's health check.

    Returns:
        0 where grpc.health.v1 says SERVING, else 1.
    """
    target, service = [*(sys.argv[1:] if argv is None else argv), ""][:2]

    async def ask() -> bool:
        probe = GrpcProbe(target)
        try:
            return await probe.is_serving(service)
        finally:
            await probe.close()

    return 0 if asyncio.run(ask()) else 1


if __name__ == "__main__":
    sys.exit(main())
