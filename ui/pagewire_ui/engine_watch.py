"""The engine's statistics over the public gRPC API, one stream for all who look. Nothing of
Gradio here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from pagewire.v1 import engine_pb2
from pagewire_ui.engine_history import EngineHistory, Moment
from pagewire_ui.frontend_link import FrontendLink

_TIMEOUT_S = 5.0
_INTERVAL_MS = 1000
# The stream ends when nobody has looked for so long.
_IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class EngineSight:
    """What was seen of the engine.

    Attributes:
        stats: None where nothing was.
        error: why nothing was seen, for the person at the page.
        moments: what was seen before, up to this.
    """

    stats: engine_pb2.GetStatsResponse | None = None
    error: str = ""
    moments: Sequence[Moment] = ()


class EngineWatch:
    """Follows the engine behind one frontend for as long as somebody looks. Make it, and use it, in
    one event loop.

    One stream serves all visitors: in it a request keeps its number, and so its colour.
    """

    def __init__(self, link: FrontendLink) -> None:
        self._link = link
        self._last = EngineSight()
        self._history = EngineHistory()
        self._looked_at = 0.0
        self._seen = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def look(self) -> EngineSight:
        """The queues and blocks as they were told last."""
        self._looked_at = time.monotonic()
        if self._following is None or self._following.done():
            self._seen = asyncio.Event()
            self._following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._seen.wait()
        except TimeoutError:
            return EngineSight(error="The engine did not show itself in time.")
        return self._last

    async def _follow(self) -> None:
        """Reads the stream until nobody has looked for a while."""
        request = engine_pb2.GetStatsRequest(interval_ms=_INTERVAL_MS, with_window=True)
        call = self._link.observability.WatchStats(request, metadata=self._link.metadata)
        try:
            async for stats in call:
                self._history.add(Moment.of(stats, time.monotonic()))
                self._last = EngineSight(stats, moments=self._history.moments())
                self._seen.set()
                if time.monotonic() - self._looked_at > _IDLE_S:
                    return
        except grpc.aio.AioRpcError as error:
            self._last = EngineSight(error=self._link.explain(error))
        finally:
            call.cancel()
            self._seen.set()

    async def close(self) -> None:
        """Ends the stream."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
