"""The engine as a server: control calls, delta wire, health and reflection around one loop."""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagewire.certificates import RenewedTls
from pagewire.config import EngineConfig
from pagewire.listening import LOOPBACK, addresses_of, can_bind, check_free, free_port
from pagewire.service_name import Program
from pagewire.settings import SettingsError, UnmetSettingError
from pagewire.tls import ServerTls
from pagewire.tracing import Tracing, check_installed
from pagewire.v1 import engine_pb2, engine_pb2_grpc
from pagewire_engine.adapters.service import AdapterService
from pagewire_engine.build import BuiltEngine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.errors import StartupError, UnmetStartupError
from pagewire_engine.grpc_errors import ErrorInterceptor
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.servicer import MAX_ADAPTER_CALLS, MAX_COMPILE_WAITS, EngineServicer
from pagewire_engine.stream_endpoint import LOOPBACK_NAMES, StreamEndpoint, check_endpoint
from pagewire_engine.token_stream import LoopHealth, TokenStreams, new_epoch

logger = logging.getLogger(__name__)

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
# A prompt of 128k tokens is 0.4 MB; with the past of many sequences a few MB.
MAX_REQUEST_BYTES = 16 << 20
STUCK_AFTER_S = 30.0
_DRAIN_POLL_S = 0.05
# What may wait for long, and enough besides for calls that must be answered at once.
_CALL_THREADS = MAX_COMPILE_WAITS + MAX_ADAPTER_CALLS + 24
_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # A second server on the same port is an error, not a silent share of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class EngineServer:
    """Serves a built engine.

    Args:
        built: the engine and what it serves.
        config: addresses and limits.

    Raises:
        StartupError: there can be no traces, or the certificate can't be used.
    """

    def __init__(self, built: BuiltEngine, config: EngineConfig) -> None:
        self._built = built
        self._config = config
        self._died = threading.Event()
        self._tls = _tls(config)
        try:
            self._tracing = Tracing.open(config.otlp_traces_endpoint, Program.ENGINE)
        except SettingsError as error:
            raise _startup_error(error) from None
        self._loop = EngineLoop(built.engine, self._publish, on_death=self._died.set)
        self._streams = TokenStreams(
            StreamEndpoint(config.stream_endpoint, config.host),
            new_epoch(),
            self._loop.abort,
            self._observe_loop,
            session_timeout_s=config.session_timeout_s,
            tracing=self._tracing,
        )
        adapters = AdapterService(built.adapters, self._loop, config, built.served_model_name)
        self._servicer = EngineServicer(
            built,
            self._loop,
            self._streams,
            adapters,
            config.seed,
            self._tls,
            traces=self._tracing is not None,
        )
        self._health = health.HealthServicer()
        self._serving: bool | None = None
        self._stopped = False
        self._grpc = grpc.server(
            ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="control"),
            interceptors=[ErrorInterceptor()],
            options=_SERVER_OPTIONS,
        )
        engine_pb2_grpc.add_EngineServicer_to_server(self._servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            self._health, self._grpc
        )
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )

    @property
    def died(self) -> bool:
        """Whether the engine's loop ended by a fault. Then its process must end without a goodbye:
        only a death lets the frontends count who was in flight."""
        return self._died.is_set()

    @property
    def epoch(self) -> int:
        """This life of the engine."""
        return self._streams.epoch

    @property
    def stream_endpoint(self) -> str:
        """Where the delta wire is reached."""
        return self._streams.endpoint.advertised

    def start(self) -> int:
        """Starts every thread and answers calls from now on.

        Returns:
            The port of the control API.

        Raises:
            StartupError: an address can't be bound.
        """
        try:
            port = bind(self._grpc, self._config.host, self._config.port, self._tls)
        except StartupError:
            self._streams.stop()
            raise
        self._loop.start()
        self._streams.start()
        self._grpc.start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._observe_loop()
        return port

    def drain(self, timeout_s: float, hurry: threading.Event) -> None:
        """Takes no new request, and waits until those that run have ended or have been moved to
        other engines by their frontends.

        Args:
            timeout_s: how long to wait.
            hurry: set by another thread or a signal: wait no longer.
        """
        self._servicer.drain()
        deadline = time.monotonic() + timeout_s
        while self._loop.has_requests and time.monotonic() < deadline:
            if hurry.wait(_DRAIN_POLL_S):
                return

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends calls, tells the frontends goodbye, and frees the model. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        self._health.enter_graceful_shutdown()
        self._servicer.stop()
        stopping = self._grpc.stop(grace_s)
        # Before the calls have ended: a frontend that hears goodbye need not wait for silence.
        self._streams.stop()
        self._loop.stop()
        stopping.wait()
        self._built.shutdown()
        if self._tracing is not None:
            self._tracing.close()

    def _publish(self, outputs: StepOutputs) -> None:
        self._streams.publish(outputs)

    def _observe_loop(self) -> LoopHealth:
        """The loop's progress; health follows it: a stuck engine serves nobody."""
        progress = self._loop.progress()
        stuck = progress.busy and progress.age_s > STUCK_AFTER_S
        serving = not stuck and not self._servicer.draining
        if serving != self._serving:
            if stuck:
                logger.error(
                    "step %d has shown no progress for %.0f s", progress.step, progress.age_s
                )
            self._serving = serving
            statuses = health_pb2.HealthCheckResponse
            self._health.set(SERVICE_NAME, statuses.SERVING if serving else statuses.NOT_SERVING)
        stats = self._loop.stats()
        return LoopHealth(
            progress.step,
            progress.age_s,
            progress.busy,
            draining=self._servicer.draining,
            num_running=stats.num_running + stats.num_swapped,
            num_waiting=stats.num_waiting,
        )


def check_addresses(config: EngineConfig) -> None:
    """Finds out in a moment what would otherwise be found out after the model was loaded.

    Raises:
        StartupError: an address is malformed, taken, or not this machine's; or its certificate
            can't be used; or there can be no traces.
    """
    _tls(config)
    try:
        check_installed(config.otlp_traces_endpoint)
    except SettingsError as error:
        raise _startup_error(error) from None
    if config.stream_endpoint is not None:
        check_endpoint(config.stream_endpoint)
    host = LOOPBACK if config.host == "localhost" else config.host
    try:
        check_free(addresses_of(host.strip("[]")), config.port, "--port")
    except UnmetSettingError:
        raise _cannot_listen(host, config.port) from None
    except SettingsError as error:
        raise StartupError(str(error)) from None


def bind(server: grpc.Server, host: str, port: int, tls: RenewedTls | None = None) -> int:
    """Binds a gRPC server; a loopback name binds both loopbacks, since clients differ in which of
    them "localhost" means.

    Returns:
        The port.

    Raises:
        StartupError: the address is taken or not ours.
    """
    if host not in LOOPBACK_NAMES:
        return _add_port(server, _bracketed(host), port, tls)
    loopbacks = addresses_of("localhost")
    if host == "::1":
        loopbacks.reverse()
    try:
        # A port that is free on both, found before gRPC takes either: it can't give one back.
        bound = port or free_port(loopbacks)
    except SettingsError:
        raise _cannot_listen(host, port) from None
    for number, (family, address) in enumerate(loopbacks):
        if number == 0 or can_bind((family, address), bound):
            _add_port(server, _bracketed(address), bound, tls)
    return bound


def _tls(config: EngineConfig) -> RenewedTls | None:
    try:
        tls = ServerTls.from_settings(config.tls_cert, config.tls_key, config.tls_client_ca)
        return None if tls is None else RenewedTls(tls)
    except SettingsError as error:
        raise StartupError(str(error)) from None


def _add_port(server: grpc.Server, host: str, port: int, tls: RenewedTls | None) -> int:
    address = f"{host}:{port}"
    try:
        bound = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.grpc_credentials())
        )
    except RuntimeError:
        bound = 0
    if not bound:
        raise _cannot_listen(host, port)
    return bound


def _bracketed(host: str) -> str:
    """The host as addresses spell it; "*" is every address of the machine."""
    if host == "*":
        return "[::]" if can_bind((socket.AF_INET6, "::"), 0) else "0.0.0.0"
    return f"[{host}]" if ":" in host and "[" not in host else host


def _startup_error(error: SettingsError) -> StartupError:
    unmet = isinstance(error, UnmetSettingError)
    return UnmetStartupError(str(error)) if unmet else StartupError(str(error))


def _cannot_listen(host: str, port: int) -> StartupError:
    return UnmetStartupError(
        f"cannot listen on {host}:{port}: the port is taken or the address is not this "
        "machine's; choose another with --port and --host",
        field="port",
    )
