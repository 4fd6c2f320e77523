"""The frontend's server: the gRPC and the HTTP API in one event loop, over one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pagewire.certificates import RenewedTls
from pagewire.errors import PagewireError, UnavailableError
from pagewire.listening import (
    addresses_of,
    free_port,
    grpc_addresses,
    listen,
    listen_locally,
    shown_host,
)
from pagewire.service_name import Program
from pagewire.tls import ClientTls, ServerTls
from pagewire.tracing import Tracing
from pagewire_frontend.certificate_figures import CertificateFigures
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.engine_client.base import EngineClient
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.grpc_api.server import GrpcServer
from pagewire_frontend.http_server import HttpServer
from pagewire_frontend.openai_api.app import create_app, create_worker_app
from pagewire_frontend.serving import Serving
from pagewire_frontend.template_files import load_chat_templates
from pagewire_frontend.workers import Worker

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.2
_RECONNECT_S = 1.0
_ADAPTER_POLL_S = 1.0
# After the grace period, for clients to be told that their requests are ended: these may wait until
# an engine that does not answer has been told too.
_FAREWELL_S = 2.5


class FrontendServer:
    """Serves from the moment it is started: liveness always, text once the engine is there.

    Args:
        config: the settings.
        client: the engine, not yet started. None: those at `config.engine`.
        worker: which of several processes on the same ports this is; None: the only one.

    Raises:
        SettingsError: keys or certificates can't be used, or there can be no traces.

    Attributes:
        http_port, grpc_port: the ports in use, once started.
    """

    def __init__(
        self,
        config: FrontendConfig,
        client: EngineClient | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.config = config
        self.http_port = 0
        self.grpc_port = 0
        self._settings = GenerationSettings(
            parse_control_tokens_in_chat=config.parse_control_tokens_in_chat,
            parse_control_tokens_in_prompts=config.parse_control_tokens_in_prompts,
            allow_request_chat_template=config.allow_request_chat_template,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            chat_templates=(
                None if config.chat_template is None else load_chat_templates(config.chat_template)
            ),
        )
        self._client = client
        self._make_client: Callable[[], EngineClient] = (
            (lambda: client) if client is not None else self._remote_client
        )
        self._worker = worker
        self._serving = Serving(config, worker)
        self._tracing = self._serving.tracing = Tracing.open(
            config.otlp_traces_endpoint,
            Program.FRONTEND,
            {} if worker is None else {"pagewire.worker": worker.index},
        )
        tls = ServerTls.from_settings(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._tls = None if tls is None else RenewedTls(tls)
        self._engine_tls = ClientTls.from_settings(
            "--engine-", config.engine_ca, config.engine_cert, config.engine_key
        )
        self._serving.metrics.registry.register(
            CertificateFigures(self._tls, tls, self._engine_tls)
        )
        self._grpc: GrpcServer | None = None
        self._http: HttpServer | None = None
        self._sibling_http: HttpServer | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._adapters_task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._was_ready = False

    async def start(self, *, wait_for_engine: bool = True) -> None:
        """Binds the ports and serves.

        Args:
            wait_for_engine: return only once text can be served; liveness and 503 are answered
                meanwhile.

        Raises:
            OSError, SettingsError: a port or the host can't be used.
            PagewireError: the engine is there, but its tokenizer or template can't be used.
        """
        config = self.config
        try:
            sockets = listen(
                config.host, config.http_port, "--http-port", share=self._worker is not None
            )
            self.http_port = int(sockets[0].getsockname()[1])
            self._http = HttpServer(
                create_app(self._serving),
                config,
                sockets,
                self._tls,
                on_cut_off=lambda: self._serving.metrics.slow_client_cut_off("http"),
            )
            await self._http.start()
            if self._worker is not None:
                opened = listen_locally(self._worker.socket_path)
                app = create_worker_app(self._serving)
                self._sibling_http = HttpServer(app, config, [opened], None)
                await self._sibling_http.start()
            await self._start_grpc()
            self._engine_task = asyncio.create_task(self._attend_engine())
            self._engine_task.add_done_callback(self._on_engine_task_end)
            self._adapters_task = asyncio.create_task(self._follow_adapters())
            self._adapters_task.add_done_callback(_log_failure)
            if wait_for_engine:
                await self.wait_until_connected()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise

    async def wait_until_connected(self) -> None:
        """Returns once the engine was reached for the first time.

        Raises:
            PagewireError: it was, but its tokenizer or template can't be used.
        """
        assert self._engine_task is not None, "start the server first"
        waiting = asyncio.create_task(self._connected.wait())
        try:
            await asyncio.wait({waiting, self._engine_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._engine_task.done():
            self._engine_task.result()

    async def stop(self, grace_s: float | None = None) -> None:
        """Takes nothing new, lets running requests end within the grace period, then ends them:
        their clients are told UNAVAILABLE.

        Args:
            grace_s: instead of the configured grace period.
        """
        grace_s = self.config.grace_period_s if grace_s is None else grace_s
        self._serving.stopping = True
        servers = [server for server in (self._grpc, self._http) if server is not None]
        stopping = asyncio.gather(*(server.stop(grace_s + _FAREWELL_S) for server in servers))
        await asyncio.wait({stopping}, timeout=grace_s)
        if num_ended := self._serving.shutdown.end_all():
            logger.warning(
                "the grace period of %g s (--grace-period-s) is over: %d requests that still ran "
                "are ended as UNAVAILABLE",
                grace_s,
                num_ended,
            )
        await stopping
        if self._sibling_http is not None:
            await self._sibling_http.stop(0.0)
        for task in (self._adapters_task, self._engine_task):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        self._adapters_task = self._engine_task = None
        if self._client is not None:
            await self._client.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _start_grpc(self) -> None:
        config = self.config
        attempts = 1 if config.grpc_port else 10
        while True:
            attempts -= 1
            port = config.grpc_port or free_port(addresses_of(config.host))
            worker = self._worker
            server = GrpcServer(self._serving, share_port=worker is not None)
            try:
                await server.start(
                    grpc_addresses(config.host, port, "--grpc-port", share=worker is not None),
                    self._tls,
                    # A path can't be shared: the last to bind it would have it alone.
                    config.local_socket if worker is None or worker.index == 0 else None,
                )
            except OSError:
                await server.stop(0.0)
                if not attempts:
                    raise
                continue  # another process took the port that had just been free
            self._grpc, self.grpc_port = server, port
            return

    def _remote_client(self) -> EngineClient:
        from pagewire_frontend.engine_client.remote import RemoteEngineClient

        return RemoteEngineClient(
            *self.config.engine,
            failover_window_s=self.config.failover_timeout_s,
            tls=self._engine_tls,
            counts=self._serving.metrics.failover,
            frames=self._serving.metrics.frames,
        )

    async def _attend_engine(self) -> None:
        """Connects, however long it takes, and then tells health checks how the engine is."""
        while True:
            client = self._client = self._make_client()
            try:
                await client.start()
                generation = await Generation.create(client, self._settings)
                self._serving.connect(generation)
                self._warn_of_tools(generation)
                break
            except UnavailableError as error:
                logger.warning("the engine is not there yet: %s", error.message)
                await client.close()
            await asyncio.sleep(_RECONNECT_S)
        while True:
            if self._serving.model_changed:
                await self._adopt_model(client)
            await self._tell_readiness()
            await asyncio.sleep(_READY_POLL_S)

    def _warn_of_tools(self, generation: Generation) -> None:
        """Says of a tool parser that was asked for that it will have nothing to parse."""
        parser = self._settings.tool_call_parser
        if parser in ("auto", "none") or generation.tokenizer_or_none is None:
            return
        if self._worker is not None and self._worker.index:
            return  # the first one says it for all
        name = generation.chat_template.ignoring_tools
        if name is None:
            return
        given = name in (self._settings.chat_templates or {})
        logger.warning(
            "--tool-call-parser %s: the chat template %r %s ignores tools, so the model is never "
            "told of any; give one that shows them by --chat-template",
            parser,
            name,
            "of --chat-template" if given else "of the model",
        )

    def _on_engine_task_end(self, task: asyncio.Task[None]) -> None:
        # What can't be served from the start is told to who waits for that, in a line.
        if self._connected.is_set() or not _is_refusal(task):
            _log_failure(task)

    async def _follow_adapters(self) -> None:
        """Learns of adapters that others load and unload."""
        while True:
            await asyncio.sleep(_ADAPTER_POLL_S)
            try:
                if self._serving.ready:
                    await self._serving.generation.adapters.refresh()
            except PagewireError as error:
                logger.debug("the engine did not tell its adapters: %s", error)
            except Exception:
                # Not the end of it: whatever was loaded later would not be found.
                logger.exception("the engine's adapters could not be learnt; trying again")

    async def _adopt_model(self, client: EngineClient) -> None:
        try:
            self._serving.connect(await Generation.create(client, self._settings))
            logger.warning("the engine came back with another model: its tokenizer is used now")
        except PagewireError as error:
            logger.error("the engine came back with a model that can't be used: %s", error)
            await asyncio.sleep(_RECONNECT_S)

    async def _tell_readiness(self) -> None:
        ready = self._serving.ready
        if ready == self._was_ready:
            return
        self._was_ready = ready
        assert self._grpc is not None
        await self._grpc.set_ready(ready)
        if self._connected.is_set() and not self._serving.stopping:
            logger.log(
                logging.INFO if ready else logging.WARNING,
                "%s: %s",
                self.config.engines,
                "back" if ready else "away; streams wait",
            )
        if ready:
            self._connected.set()


def _is_refusal(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), PagewireError)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("health is no longer told: %s", error, exc_info=error)


def describe_addresses(server: FrontendServer) -> str:
    """The addresses for people, such as `HTTP http://localhost:8000, gRPC localhost:50051`."""
    host = shown_host(server.config.host)
    scheme = "http" if server.config.tls_cert is None else "https"
    return f"HTTP {scheme}://{host}:{server.http_port}, gRPC {host}:{server.grpc_port}"
