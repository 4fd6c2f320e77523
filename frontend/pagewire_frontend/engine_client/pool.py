"""The engines of a frontend: their links, and the requests in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from pagewire.delta_frames import FrameCounts
from pagewire.errors import PagewireError, UnavailableError
from pagewire.tls import ClientTls
from pagewire_frontend.engine_client.adapter_restoring import RememberedAdapters, versions_in
from pagewire_frontend.engine_client.base import ModelInfo
from pagewire_frontend.engine_client.control import ControlChannel
from pagewire_frontend.engine_client.endpoints import Endpoints, Target
from pagewire_frontend.engine_client.failover import Failover
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_client.fleet import Fleet, described
from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.model_identity import ReplicaIdentity

_logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 5.0
_LEAST_INTERVAL_S = 1.0


class EnginePool:
    """Connects to every engine there is, and follows them as they come and go.

    Args:
        endpoints: where they are.
        window_s: how long a request may be without an engine.
        tls: of the control channels; None: they have none.
        counts: where losses, moves and resumptions are counted.
        frames: where what becomes of the delta wire's frames is counted.

    Attributes:
        fleet: the links.
        failover: the requests in them.
        adapters: what each engine must have.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        window_s: float,
        tls: ClientTls | None,
        counts: FailoverCounts,
        frames: FrameCounts,
    ) -> None:
        self.fleet = Fleet(window_s)
        self.failover = Failover(self.fleet, window_s, self._prepare, counts)
        self._frames = frames
        self.adapters = RememberedAdapters()
        self._endpoints = endpoints
        self._window_s = window_s
        self._tls = tls
        self._targets: dict[str, Target] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Returns once one engine takes requests; the others are connected to as they come.

        Raises:
            UnavailableError: none could be reached within the window.
            PagewireError: what answers is no engine.
        """
        deadline = time.monotonic() + self._window_s
        await self._look_up()
        if self._endpoints.change:
            self._watcher = asyncio.create_task(self._follow(), name="engine-names")
        while not self.fleet.ready:
            links = list(self.fleet.links.values())
            faults = [link.fault for link in links if link.fault is not None]
            if faults and len(faults) == len(links):
                raise faults[0]
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                errors = "; ".join(dict.fromkeys(link.last_error for link in links))
                raise UnavailableError(
                    f"{described(links)} could not be reached for {self._window_s:g} s: {errors}"
                )
            # A fault is no news.
            await self.fleet.wait_for_news(min(rest_s, 0.1))

    async def close(self) -> None:
        """Ends our sessions, which aborts what lives, and disconnects. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
        await self.failover.close()
        links = list(self.fleet.links.values())
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def _look_up(self) -> None:
        """Learns which engines there are now."""
        self._targets = await self._endpoints.targets()
        for link in self.fleet.set_names(self._targets, self._new_link):
            link.start()
        self.fleet.announce()
        for link in self.fleet.take_forgotten():
            _logger.info("the engine at %s is left", link.name)
            with contextlib.suppress(PagewireError):
                await link.close()

    async def _follow(self) -> None:
        looked_up = time.monotonic()
        while True:
            await asyncio.sleep(_LEAST_INTERVAL_S)
            # Soon when an engine has gone: its successor may have another address.
            soon = any(link.away or link.retired for link in self.fleet.links.values())
            if not soon and time.monotonic() - looked_up < RESOLVE_INTERVAL_S:
                continue
            looked_up = time.monotonic()
            try:
                await self._look_up()
            except Exception:
                _logger.exception("the engines' names could not be looked up; trying again")

    def _new_link(self, name: str) -> EngineLink:
        target = self._targets[name]
        return EngineLink(
            name,
            lambda: ControlChannel(target.address, self._tls, target.certified_name),
            self.failover,
            self._frames,
        )

    async def _prepare(self, link: EngineLink, info: ModelInfo) -> None:
        """An engine gets the adapters that the others have, before it gets requests."""
        identity = self.fleet.identity
        if not info.max_loras or (identity is not None and ReplicaIdentity.of(info) != identity):
            link.adapters = {}
            return
        others = any(other is not link for other in self.fleet.usable)
        await self.adapters.restore(
            link.control,
            self._window_s,
            served_model_name=info.served_model_name,
            forgets=not others,
        )
        if len(self.fleet.links) > 1:
            link.adapters = versions_in(await link.control.list_adapters())
