"""The HTTP server: uvicorn, and what it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from pagewire.certificates import RenewedTls
from pagewire.descriptors import spare_descriptors
from pagewire.listening import close_all
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.openai_api.http_protocol import BoundedHttpProtocol

logger = logging.getLogger(__name__)

_COUNT_INTERVAL_S = 0.25
# uvicorn looks ten times a second, and then lets idle connections close.
_LEAST_GRACE_S = 1.0
# For requests that were cut off to abort their work in the engine.
_ABORT_WAIT_S = 5.0
# Kept free: for connections to engines, and for the files that answers need.
_LEAST_DESCRIPTORS = 16


class HttpServer:
    """uvicorn on sockets of ours, without its signal handlers.

    While hardly any file descriptor is left it takes no connections: they wait in the kernel's
    queue. An accept that finds none would be tried again and again, in a loop without a pause.

    Args:
        app: what answers.
        config: limits and timeouts.
        sockets: bound; closed with the server.
        tls: what to show; None: it speaks plain HTTP.
        on_cut_off: called when a client was cut off for not reading.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: FrontendConfig,
        sockets: list[socket.socket],
        tls: RenewedTls | None,
        on_cut_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._sockets = sockets
        server = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=None,
            access_log=config.log_level == "debug",
            server_header=False,
            timeout_keep_alive=75,
            http=_protocol(config, on_cut_off),
        )
        server.load()
        if tls is not None:
            server.ssl = tls.context()
        self._server = _Uvicorn(server)
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # Servers close their sockets; ours stay open, to be listened on again.
        listeners = [each.dup() for each in self._sockets]
        self._task = asyncio.create_task(self._server.serve(listeners))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError("the HTTP server did not start")
            await asyncio.sleep(0.005)
        self._watch = asyncio.create_task(self._watch_descriptors())

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, and cuts off those that are not over after `grace_s`."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=max(_LEAST_GRACE_S, grace_s))
            if not self._task.done():
                self._cut_off()
                await asyncio.wait({self._task}, timeout=_ABORT_WAIT_S)
            self._server.force_exit = True
            await self._task
        close_all(self._sockets)

    def _cut_off(self) -> None:
        """Its requests find that the client has left, as any other's. uvicorn would cancel them,
        and answer 500 in a shape of its own."""
        connections = list(self._server.server_state.connections)
        logger.warning("%d HTTP connections did not end: they are cut off", len(connections))
        for connection in connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def _watch_descriptors(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_INTERVAL_S)
            # On an older kernel it may take as long as many tokens do.
            spare = await asyncio.to_thread(spare_descriptors)
            try:
                if self._server.servers and spare < _LEAST_DESCRIPTORS:
                    self._pause(spare)
                elif not self._server.servers and spare >= 2 * _LEAST_DESCRIPTORS:
                    await self._listen_again()
            except OSError as error:
                logger.error("the HTTP port can't be listened on: %s; trying again", error)

    def _pause(self, spare: int) -> None:
        servers, self._server.servers = self._server.servers, []
        for server in servers:
            server.close()
        logger.error(
            "this process may open %d more files: HTTP takes no new connections until others have "
            "closed theirs; raise the limit (ulimit -n, LimitNOFILE)",
            spare,
        )

    async def _listen_again(self) -> None:
        """Listens on all of the sockets, or, where one can't be or it is cancelled, on none."""
        listening: list[asyncio.Server] = []
        try:
            for each in self._sockets:
                server = await self._server_on(each)
                listening.append(server)
                await server.start_serving()
        except BaseException:
            for server in listening:
                server.close()
            raise
        self._server.servers = listening
        logger.warning("there are file descriptors again: HTTP takes connections")

    async def _server_on(self, bound: socket.socket) -> asyncio.Server:
        """A server that does not serve yet: one that is cancelled while it starts to would be
        known to nobody, and take connections."""
        config, listener = self._server.config, bound.dup()

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's
                config=config,
                server_state=self._server.server_state,
                app_state=self._server.lifespan.state,
            )

        try:
            return await asyncio.get_running_loop().create_server(
                protocol,
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                start_serving=False,
            )
        except BaseException:
            listener.close()
            raise


def _protocol(
    config: FrontendConfig, told_cut_off: Callable[[], None]
) -> type[BoundedHttpProtocol]:
    class Protocol(BoundedHttpProtocol):
        read_timeout_s = config.request_read_timeout_s
        write_timeout_s = config.slow_client_timeout_s
        on_cut_off = staticmethod(told_cut_off)

    return Protocol


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the command's business: it stops gRPC too.
        yield
