"""An engine in another process, reached by gRPC and the delta wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from pagewire.delta_frames import FrameCounts
from pagewire.errors import UnavailableError
from pagewire.tls import ClientTls
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo, TokenDelta
from pagewire_frontend.engine_client.control import CALL_TIMEOUT_S
from pagewire_frontend.engine_client.failover import EngineLink
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.live_request import LiveRequest

_ABORT_WAIT_S = 2.0


class RemoteTokenStream:
    """The tokens of one request in a remote engine. See `TokenStream`.

    A stream that is dropped before its end aborts its request.
    """

    def __init__(self, link: EngineLink, live: LiveRequest) -> None:
        self._link = link
        self._live = live
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        deltas = await self._live.mailbox.take()
        if not deltas:
            raise StopAsyncIteration
        return deltas

    @property
    def resumptions(self) -> int:
        return self._live.resumptions

    async def finish_sequence(self, sequence_index: int) -> None:
        """A stop string ended this sequence; no further delta of it is delivered."""
        await _told(self._link.finish_sequence(self._live, sequence_index))

    async def abort(self) -> None:
        """Ends the request in the engine. Safe to call twice and after the end."""
        await _told(self._link.abandon(self._live))

    def __del__(self) -> None:
        if not self._live.mailbox.ended:
            # The collector may run on any thread, and after the loop was closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._link.abandon, self._live)


class RemoteEngineClient:
    """Implements EngineClient over both wires.

    Args:
        target: HOST:PORT of the engine's control API.
        failover_window_s: how long a request may be without an engine before it fails with
            UnavailableError.
        tls: of the control channel; None: it has none.
        counts: where losses and resumptions are counted; None: by itself.
        frames: where what becomes of the delta wire's frames is counted.
    """

    def __init__(
        self,
        target: str,
        *,
        failover_window_s: float = 120.0,
        tls: ClientTls | None = None,
        counts: FailoverCounts | None = None,
        frames: FrameCounts | None = None,
    ) -> None:
        self._target = target
        self._counts = counts
        self._tls = tls
        self._frames = frames or FrameCounts()
        self._window_s = failover_window_s
        self._link: EngineLink | None = None

    async def start(self) -> None:
        """Connects, and waits until the engine's model is known.

        Raises:
            UnavailableError: the engine can't be reached within the failover window.
        """
        if self._link is not None:
            return
        # Here and not earlier: the channel belongs to the running loop.
        link = EngineLink(self._target, self._window_s, self._tls, self._counts, self._frames)
        try:
            await link.start()
        except BaseException:
            await link.close()
            raise
        self._link = link

    async def close(self) -> None:
        """Aborts every live request and disconnects. Safe to call twice."""
        if self._link is not None:
            await self._link.close()

    @property
    def model_info(self) -> ModelInfo:
        """What the engine serves; known after `start`."""
        if self._link is None or self._link.model_info is None:
            raise UnavailableError("the engine client is not started")
        return self._link.model_info

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self._link is not None and self._link.ready

    async def fetch_tokenizer(self) -> Mapping[str, bytes]:
        """The files that make the tokenizer; empty when the engine has none."""
        return await self._started().control.tokenizer_files()

    async def load_adapter(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads an adapter; returns when requests may name it."""
        link = self._started()
        info = await link.control.load_adapter(request)
        link.adapters.note_loaded(info)
        return info

    async def unload_adapter(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter, as its requests have ended or are ended."""
        link = self._started()
        response = await link.control.unload_adapter(request)
        link.adapters.note_unloaded(request.name)
        return response

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, and where it is; nothing where that is known in this revision."""
        link = self._started()
        if not link.ready:
            raise UnavailableError("the engine is away")
        listed = await link.control.list_adapters(unless_revision)
        if not unless_revision or listed.revision != unless_revision:
            link.adapters.note_listed(listed)
        return listed

    async def adapter_files(self, name: str, version: str) -> Mapping[str, bytes]:
        """The files of a tokenizer and chat template that an adapter ships, maybe none."""
        return await self._started().control.tokenizer_files(name, version)

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        """What the engine counts, as of now.

        Raises:
            UnavailableError: it is away, or has not answered in time.
        """
        link = self._started()
        if not link.ready:
            raise UnavailableError("the engine is away")
        return await link.control.stats(timeout_s)

    async def watch_stats(
        self, interval_ms: int, *, with_window: bool
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        """The same again and again, until the reader closes it.

        Raises:
            UnavailableError: the engine is away.
            ResourceExhaustedError: too many watch it.
        """
        request = engine_pb2.GetStatsRequest(interval_ms=interval_ms, with_window=with_window)
        timeout_s = None if interval_ms else CALL_TIMEOUT_S
        async with aclosing(
            self._started().control.watch_stats(request, timeout_s=timeout_s)
        ) as watching:
            async for stats in watching:
                yield stats

    async def submit(self, request: EngineRequest) -> RemoteTokenStream:
        """Hands a request over; returns once the engine has accepted it.

        Raises:
            InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError: it was refused.
            UnavailableError: no engine within the failover window.
        """
        link = self._started()
        return RemoteTokenStream(link, await link.submit(request))

    def _started(self) -> EngineLink:
        if self._link is None:
            raise UnavailableError("the engine client is not started")
        return self._link


async def _told(task: asyncio.Task[None] | None) -> None:
    """Waits until the engine has been told, within bounds; the task goes on if we are cancelled."""
    if task is not None:
        await asyncio.wait((task,), timeout=_ABORT_WAIT_S)
