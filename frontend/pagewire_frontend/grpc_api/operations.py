"""pagewire.v1.Adapters and pagewire.v1.Observability: what the operator may allow."""

from __future__ import annotations

import itertools
from contextlib import aclosing
from typing import Any

import grpc

from pagewire.errors import FailedPreconditionError, ResourceExhaustedError
from pagewire.v1 import engine_pb2, operations_pb2_grpc
from pagewire_frontend.grpc_api.errors import answers_errors
from pagewire_frontend.grpc_api.write_guard import WriteGuard
from pagewire_frontend.serving import Serving

# Someone at a screen needs no more.
_LEAST_INTERVAL_MS = 100
# Between two messages a watcher does not see that the server stops.
_MOST_INTERVAL_MS = 10_000
# Each keeps a thread of the engine.
MAX_WATCHERS = 4
Context = grpc.aio.ServicerContext[Any, Any]


class AdaptersServicer(operations_pb2_grpc.AdaptersServicer):  # type: ignore[misc]  # generated, untyped
    """Loads, unloads and lists LoRA adapters, where the operator allows it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @answers_errors
    async def Load(
        self, request: engine_pb2.LoadAdapterRequest, context: Context
    ) -> engine_pb2.LoadAdapterResponse:
        info = await self._serving.managed_adapters.load(request)
        return engine_pb2.LoadAdapterResponse(adapter=info)

    @answers_errors
    async def Unload(
        self, request: engine_pb2.UnloadAdapterRequest, context: Context
    ) -> engine_pb2.UnloadAdapterResponse:
        return await self._serving.managed_adapters.unload(request)

    @answers_errors
    async def List(
        self, request: engine_pb2.ListAdaptersRequest, context: Context
    ) -> engine_pb2.ListAdaptersResponse:
        return await self._serving.managed_adapters.list()


class ObservabilityServicer(
    operations_pb2_grpc.ObservabilityServicer  # type: ignore[misc]  # generated, untyped
):
    """Passes the engine's statistics on, where the operator allows it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._num_watchers = 0

    @answers_errors
    async def WatchStats(self, request: engine_pb2.GetStatsRequest, context: Context) -> None:
        if not self._serving.config.allow_watch_stats:
            raise FailedPreconditionError(
                "WatchStats is off on this server; start the frontend with --allow-watch-stats, or "
                "GET /metrics of its HTTP port for the counters"
            )
        if request.interval_ms == 0 and not request.with_window:
            await self._watch(request, context)
            return
        if self._num_watchers >= MAX_WATCHERS:
            raise ResourceExhaustedError(
                f"{MAX_WATCHERS} clients watch this server already, the most at a time; try again "
                "later, or GET /metrics of its HTTP port for the counters"
            )
        self._num_watchers += 1
        try:
            await self._watch(request, context)
        finally:
            self._num_watchers -= 1

    async def _watch(self, request: engine_pb2.GetStatsRequest, context: Context) -> None:
        interval_ms = request.interval_ms and min(
            max(request.interval_ms, _LEAST_INTERVAL_MS), _MOST_INTERVAL_MS
        )
        names = RequestNumbers()
        watching = self._serving.generation.client.watch_stats(
            interval_ms, with_window=request.with_window
        )
        async with WriteGuard(context, self._serving) as guard, aclosing(watching):
            async for stats in watching:
                names.replace(stats.window)
                stats.adapters.ClearField("running")
                stats.adapters.ClearField("waiting")
                first_token = self._serving.metrics.first_token()
                stats.time_to_first_token.CopyFrom(
                    engine_pb2.Histogram(
                        bounds=first_token.bounds,
                        counts=first_token.counts,
                        sum=first_token.sum,
                    )
                )
                await guard.write(stats)
                if self._serving.stopping:
                    return


class RequestNumbers:
    """Numbers in place of request ids, which clients choose and may put anything into. A request
    keeps its number for as long as one watcher sees it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1)

    def replace(self, window: engine_pb2.EngineWindow) -> None:
        """Takes the ids out of a window."""
        numbers: dict[str, int] = {}
        for view in window.requests:
            number = self._numbers.get(view.id)
            numbers[view.id] = next(self._next) if number is None else number
            view.id = str(numbers[view.id])
        self._numbers = numbers
