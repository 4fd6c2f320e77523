"""The gRPC server: services, health, reflection, limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagewire.certificates import RenewedTls
from pagewire.settings import SettingsError
from pagewire.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
)
from pagewire_frontend.grpc_api.access import AccessInterceptor
from pagewire_frontend.grpc_api.inference import InferenceServicer
from pagewire_frontend.grpc_api.malformed import MalformedInterceptor
from pagewire_frontend.grpc_api.operations import AdaptersServicer, ObservabilityServicer
from pagewire_frontend.grpc_api.poller_thread import let_poller_wait
from pagewire_frontend.grpc_api.tracing import TracingInterceptor
from pagewire_frontend.serving import Serving

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
# Of Linux; elsewhere it is less, and gRPC says so.
_MOST_PATH_BYTES = 107
_SERVICES = (
    INFERENCE,
    operations_pb2.DESCRIPTOR.services_by_name["Adapters"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["Observability"].full_name,
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
)


def _check_path(local_socket: str) -> None:
    folder = os.path.dirname(os.path.abspath(local_socket))
    if not os.path.isdir(folder):
        raise SettingsError(f"--local-socket: there is no folder {folder}")
    if len(os.fsencode(local_socket)) > _MOST_PATH_BYTES:
        raise SettingsError(
            f"--local-socket: a socket's path has at most {_MOST_PATH_BYTES} bytes, and "
            f"{local_socket} is longer"
        )


def _options(max_request_bytes: int, *, share_port: bool) -> list[tuple[str, int]]:
    return [
        # Core refuses by the length prefix, before it has read the message.
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", -1),
        # A port in use must be an error, not a second server that gets half of the connections,
        # unless it is meant to.
        ("grpc.so_reuseport", int(share_port)),
        # Clients behind NATs ping often, and through long silences (a queue, a long prefill). Core
        # cuts them off after two early pings unless told this; its option
        # min_recv_ping_interval_without_data_ms does not exist and is ignored in silence.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A client that vanished without a FIN must not hold blocks for ever.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class GrpcServer:
    """grpc.aio server on a list of addresses."""

    def __init__(self, serving: Serving, *, share_port: bool = False) -> None:
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # behind an `if`
        interceptors: list[Any] = [AccessInterceptor(serving.access)]
        if serving.tracing is not None:
            interceptors.append(TracingInterceptor(serving.tracing))
        # The innermost: what can't be read counts against limits, and has its span.
        interceptors.append(MalformedInterceptor())
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=_options(serving.config.max_request_bytes, share_port=share_port),
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(serving), self._server)
        operations_pb2_grpc.add_AdaptersServicer_to_server(AdaptersServicer(serving), self._server)
        operations_pb2_grpc.add_ObservabilityServicer_to_server(
            ObservabilityServicer(serving), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call]  # untyped
            self._health, self._server
        )
        reflection.enable_server_reflection(_SERVICES, self._server)

    async def start(
        self,
        addresses: Sequence[str],
        tls: RenewedTls | None = None,
        local_socket: str | None = None,
    ) -> None:
        """Binds and serves.

        Args:
            addresses: HOST:PORT each.
            tls: what to speak there; None: no TLS.
            local_socket: path of a Unix socket, which never has TLS.

        Raises:
            OSError: an address can't be bound.
            SettingsError: there can be no socket of this path.
        """
        for address in addresses:
            try:
                if tls is None:
                    self._server.add_insecure_port(address)
                else:
                    self._server.add_secure_port(address, tls.grpc_credentials())
            except RuntimeError as error:
                raise OSError(f"--grpc-port: can't listen on {address}: {error}") from None
        if local_socket is not None:
            _check_path(local_socket)
            try:
                self._server.add_insecure_port(f"unix:{local_socket}")
            except RuntimeError as error:
                raise OSError(f"--local-socket: can't listen on {local_socket}: {error}") from None
        await self.set_ready(False)
        await self._server.start()
        let_poller_wait()

    async def set_ready(self, ready: bool) -> None:
        """What health checks of pagewire.v1.Inference are told; "" says the process lives."""
        serving_status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(
            INFERENCE, serving_status.SERVING if ready else serving_status.NOT_SERVING
        )

    async def stop(self, grace_s: float) -> None:
        """Takes no new call, and ends the running ones after `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
