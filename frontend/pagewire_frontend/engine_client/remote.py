"""Engines in other processes, reached by gRPC and the delta wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing

from pagewire.delta_frames import FrameCounts
from pagewire.errors import PagewireError, UnavailableError
from pagewire.tls import ClientTls
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import (
    EngineRequest,
    EngineStatus,
    EngineStatuses,
    ModelInfo,
    TokenDelta,
)
from pagewire_frontend.engine_client.control import CALL_TIMEOUT_S
from pagewire_frontend.engine_client.endpoints import Endpoints, Resolve, resolve
from pagewire_frontend.engine_client.failover import Failover
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.merged_stats import merged_stats
from pagewire_frontend.engine_client.pool import EnginePool
from pagewire_frontend.engine_client.replicated_adapters import ReplicatedAdapters

_ABORT_WAIT_S = 2.0
# Between two looks of several engines, where no interval was asked for.
_STATS_TIMEOUT_S = 2.0


class RemoteTokenStream:
    """The tokens of one request in remote engines. See `TokenStream`.

    A stream that is dropped before its end aborts its request.
    """

    def __init__(self, failover: Failover, live: LiveRequest) -> None:
        self._failover = failover
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
        """How often it went on in another engine, or in another life of its own."""
        return self._live.resumptions

    async def finish_sequence(self, sequence_index: int) -> None:
        """A stop string ended this sequence; no further delta of it is delivered."""
        await _told(self._failover.finish_sequence(self._live, sequence_index))

    async def abort(self) -> None:
        """Ends the request in the engine. Safe to call twice and after the end."""
        await _told(self._failover.abandon(self._live))

    def __del__(self) -> None:
        if not self._live.mailbox.ended:
            # The collector may run on any thread, and after the loop was closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._failover.abandon, self._live)


class RemoteEngineClient:
    """Implements EngineClient over both wires, with one engine or several that serve the same.

    Args:
        targets: HOST:PORT of each engine's control API. A DNS name with several addresses stands
            for an engine at each.
        failover_window_s: how long a request may be without an engine before it fails with
            UnavailableError.
        tls: of the control channels; None: they have none.
        counts: where losses, moves and resumptions are counted; None: by itself.
        frames: where what becomes of the delta wire's frames is counted.
        resolve: finds the addresses of a name.
    """

    def __init__(
        self,
        *targets: str,
        failover_window_s: float = 120.0,
        tls: ClientTls | None = None,
        counts: FailoverCounts | None = None,
        frames: FrameCounts | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._endpoints = Endpoints(targets, resolve)
        self._tls = tls
        self._counts = counts or FailoverCounts()
        self._frames = frames or FrameCounts()
        self._window_s = failover_window_s
        self._pool: EnginePool | None = None

    async def start(self) -> None:
        """Connects, and waits until an engine is there and its model is known.

        Raises:
            UnavailableError: no engine can be reached within the failover window.
        """
        if self._pool is not None:
            return
        # Here and not earlier: channels belong to the running loop.
        pool = EnginePool(self._endpoints, self._window_s, self._tls, self._counts, self._frames)
        try:
            await pool.start()
        except BaseException:
            await pool.close()
            raise
        self._pool = pool

    async def close(self) -> None:
        """Aborts every live request and disconnects. Safe to call twice."""
        if self._pool is not None:
            await self._pool.close()

    @property
    def model_info(self) -> ModelInfo:
        """What the engines serve; known after `start`."""
        info = None if self._pool is None else self._pool.fleet.model_info
        if info is None:
            raise UnavailableError("the engine client is not started")
        return info

    @property
    def ready(self) -> bool:
        """Whether requests can be served now: by one engine at least."""
        return self._pool is not None and not self._pool.closed and self._pool.fleet.ready

    async def fetch_tokenizer(self) -> Mapping[str, bytes]:
        """The files that make the tokenizer; empty when the engine has none."""
        return await self._one().control.tokenizer_files()

    async def load_adapter(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads an adapter into every engine; returns when requests may name it."""
        return await self._adapters().load(request)

    async def unload_adapter(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter from every engine, as its requests have ended or are ended."""
        return await self._adapters().unload(request)

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, and where it is; nothing where that is known in this revision."""
        return await self._adapters().listed(unless_revision)

    async def adapter_files(self, name: str, version: str) -> Mapping[str, bytes]:
        """The files of a tokenizer and chat template that an adapter ships, maybe none."""
        return await self._one(name).control.tokenizer_files(name, version)

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        """What the engines count, as of now, together.

        Raises:
            UnavailableError: they are away, or none has answered in time.
        """
        links = self._usable()
        if len(links) == 1:
            return await links[0].control.stats(timeout_s)
        return await _ask_all(links, engine_pb2.GetStatsRequest(), timeout_s)

    def statuses(self) -> EngineStatuses:
        """How each engine is."""
        if self._pool is None:
            return EngineStatuses()
        links = self._pool.fleet.links.values()
        return EngineStatuses(
            tuple(
                EngineStatus(link.name, link.state.value, len(link.lives), link.num_routed)
                for link in links
            ),
            dict(self._counts.moves),
        )

    async def stats_of_each(self, timeout_s: float) -> Mapping[str, engine_pb2.GetStatsResponse]:
        """What each engine counts, as of now. One that drains still has requests."""
        links = self._started().fleet.links.values()
        asked = [link for link in links if link.connected and not link.duplicate]
        answers = await _ask_each(asked, engine_pb2.GetStatsRequest(), timeout_s)
        return {
            link.name: answer
            for link, answer in zip(asked, answers, strict=True)
            if not isinstance(answer, PagewireError)
        }

    async def watch_stats(
        self, interval_ms: int, *, with_window: bool
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        """What the engines count together, again and again, until the reader closes it.

        Raises:
            UnavailableError: the engines are away.
            ResourceExhaustedError: too many watch one.
        """
        links = list(self._started().fleet.links.values())
        if len(links) == 1:
            request = engine_pb2.GetStatsRequest(interval_ms=interval_ms, with_window=with_window)
            timeout_s = None if interval_ms else CALL_TIMEOUT_S
            watching = links[0].control.watch_stats(request, timeout_s=timeout_s)
            async with aclosing(watching):
                async for stats in watching:
                    yield stats
            return
        request = engine_pb2.GetStatsRequest(with_window=with_window)
        while True:
            yield await _ask_all(self._usable(), request, _STATS_TIMEOUT_S)
            if not interval_ms:
                return
            await asyncio.sleep(interval_ms / 1000)

    async def submit(self, request: EngineRequest) -> RemoteTokenStream:
        """Hands a request over.

        Raises:
            InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError: it was refused.
            UnavailableError: no engine within the failover window.
        """
        pool = self._started()
        if pool.closed:
            raise UnavailableError("the engine client is not running")
        return RemoteTokenStream(pool.failover, await pool.failover.submit(request))

    def _started(self) -> EnginePool:
        if self._pool is None:
            raise UnavailableError("the engine client is not started")
        return self._pool

    def _usable(self) -> list[EngineLink]:
        links = self._started().fleet.usable
        if not links:
            raise UnavailableError("the engine is away")
        return links

    def _one(self, adapter: str = "") -> EngineLink:
        """Any engine; one that has the adapter, if there is one."""
        fleet = self._started().fleet
        links = fleet.usable or list(fleet.links.values())
        return next((link for link in links if adapter in link.adapters), links[0])

    def _adapters(self) -> ReplicatedAdapters:
        pool = self._started()
        return ReplicatedAdapters(pool.fleet, pool.adapters)


async def _ask_all(
    links: Sequence[EngineLink], request: engine_pb2.GetStatsRequest, timeout_s: float
) -> engine_pb2.GetStatsResponse:
    """What those engines that answer in time count together.

    Raises:
        PagewireError: none has.
    """
    answers = await _ask_each(links, request, timeout_s)
    told = [answer for answer in answers if not isinstance(answer, PagewireError)]
    for answer in answers:
        if isinstance(answer, PagewireError) and not told:
            raise answer
    return merged_stats(told)


async def _ask_each(
    links: Sequence[EngineLink], request: engine_pb2.GetStatsRequest, timeout_s: float
) -> list[engine_pb2.GetStatsResponse | PagewireError]:
    async def ask(link: EngineLink) -> engine_pb2.GetStatsResponse | PagewireError:
        try:
            async with aclosing(link.control.watch_stats(request, timeout_s=timeout_s)) as told:
                return await anext(told)
        except StopAsyncIteration:
            return UnavailableError(f"the engine at {link.name} has told no statistics")
        except PagewireError as error:
            return error

    return list(await asyncio.gather(*map(ask, links)))


async def _told(task: asyncio.Task[None] | None) -> None:
    """Waits until the engine has been told, within bounds; the task goes on if we are cancelled."""
    if task is not None:
        await asyncio.wait((task,), timeout=_ABORT_WAIT_S)
