"""Questions a supervisor asks its children: are you ready, do you make progress?"""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.tls import ClientTls
from pagewire.v1 import engine_pb2, engine_pb2_grpc
from pagewire_frontend.http_get import http_get

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


async def http_answers(host: str, port: int, path: str) -> bool:
    """Whether GET `path` is answered with status 200."""
    try:
        connecting = asyncio.open_connection(host, port)
        await http_get(connecting, path, host=host, timeout_s=PROBE_TIMEOUT_S)
    except OSError:
        return False
    return True


class GrpcProbe:
    """Asks one server over a channel that is kept open.

    Args:
        target: HOST:PORT, or unix: and a path.
        tls: whom to trust and what to show; None: no TLS.
        server_name: what the certificate names, where that is not the target's host.
    """

    def __init__(
        self, target: str, tls: ClientTls | None = None, server_name: str | None = None
    ) -> None:
        self._target = target
        self._tls = tls
        self._options: list[tuple[str, str | int]] = [*_CHANNEL_OPTIONS]
        if server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", server_name))
        self._open: grpc.aio.Channel | None = None
        self._progress: tuple[tuple[int, ...], float] = ((), 0.0)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._open is None:  # made in the loop that uses it
            if self._tls is None:
                self._open = grpc.aio.insecure_channel(self._target, options=self._options)
            else:
                credentials = self._tls.grpc_credentials()
                self._open = grpc.aio.secure_channel(self._target, credentials, self._options)
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
