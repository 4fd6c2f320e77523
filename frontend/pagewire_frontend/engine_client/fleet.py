"""The engines there are, the model that they serve, and which of them take requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable

from pagewire_frontend.engine_client.base import ModelInfo
from pagewire_frontend.engine_client.link import EngineLink, LinkState
from pagewire_frontend.engine_client.model_identity import ReplicaIdentity

_logger = logging.getLogger(__name__)


class Fleet:
    """The links, and the one model that is served through them.

    Where engines differ, those that serve another model than the rest get no requests, until none
    is left of the model that is served: then theirs takes its place.

    Args:
        window_s: how long an engine that died is waited for before another model takes its place.

    Attributes:
        links: by name, in the order in which they were given.
        model_info: what is served; None until an engine was reached.
        identity: of that.
        lost_at: when the last engine that takes requests went away, seconds of the monotonic clock;
            inf while there is one.
    """

    def __init__(self, window_s: float) -> None:
        self.links: dict[str, EngineLink] = {}
        self.model_info: ModelInfo | None = None
        self.identity: ReplicaIdentity | None = None
        self.lost_at = float("inf")
        self._window_s = window_s
        self._told: dict[str, LinkState] = {}
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_names(
        self, names: Collection[str], make: Callable[[str], EngineLink]
    ) -> list[EngineLink]:
        """From now on the engines have these names. One that is named no more is retired: what it
        runs may end there.

        Returns:
            Links that are new, to be started.
        """
        fresh = [make(name) for name in names if name not in self.links]
        for link in fresh:
            link.wanted = self.identity
            self.links[link.name] = link
        for link in self.links.values():
            retired = link.name not in names
            if retired != link.retired:
                link.retired = retired
                _logger.info(
                    "the engine at %s is %s",
                    link.name,
                    "named no more: it gets no new requests" if retired else "named again",
                )
        return fresh

    def take_forgotten(self) -> list[EngineLink]:
        """Retired links that have nothing left to do, which are removed."""
        forgotten = [link for link in self.links.values() if link.retired and not link.lives]
        for link in forgotten:
            del self.links[link.name]
            self._told.pop(link.name, None)
        return forgotten

    @property
    def usable(self) -> list[EngineLink]:
        """Those that take requests now."""
        return [link for link in self.links.values() if link.usable]

    @property
    def ready(self) -> bool:
        """Whether one does."""
        return any(link.usable for link in self.links.values())

    def twin_of(self, link: EngineLink) -> EngineLink | None:
        """Another link that gets requests for the same life of the same engine."""
        session = link.session
        for other in self.links.values():
            known = other.session
            if other is link or other.retired or not other.connected:
                continue
            if known is None or session is None:
                continue
            if known.epoch == session.epoch:
                return other
        return None

    def choose_model(self) -> None:
        """Keeps to the model that is served as long as an engine of it is there or expected back;
        then takes the one that others serve."""
        others = [link for link in self.links.values() if link.state is LinkState.OTHER_MODEL]
        if self.identity is None:
            others = self.usable
        elif not others or any(self._holds(link) for link in self.links.values()):
            return
        if not others:
            return
        chosen = others[0]
        if self.identity is not None and chosen.identity is not None:
            _logger.warning(
                "the engines serve another model from now on: %s",
                chosen.identity.difference_to(self.identity),
            )
        self.identity, self.model_info = chosen.identity, chosen.model_info
        for link in self.links.values():
            link.wanted = self.identity

    def note_connected(self, link: EngineLink) -> None:
        """An engine has been reached, perhaps in another life: the one whose description is told
        may have another now."""
        known, info = self.model_info, link.model_info
        if link.identity == self.identity:
            # One object: each request's way compares it.
            link.identity = self.identity
        if link.identity is self.identity and known is not None and info is not None:
            epochs = [
                other.session.epoch
                for other in self.links.values()
                if other is not link and other.connected and other.session is not None
            ]
            if known.epoch not in epochs:
                self.model_info = info

    def _holds(self, link: EngineLink) -> bool:
        """Whether an engine stands for the model that is served."""
        if link.identity != self.identity or link.retired or link.duplicate:
            return False
        if link.connected:
            return not link.draining
        return link.died and time.monotonic() - link.lost_at < self._window_s

    def announce(self) -> None:
        """Something has changed: whoever waits for an engine looks again."""
        for link in self.links.values():
            self._tell(link)
        if self.ready:
            self.lost_at = float("inf")
        elif self.lost_at == float("inf"):
            self.lost_at = time.monotonic()
        if not self._news.done():
            self._news.set_result(None)

    async def wait_for_news(self, timeout_s: float) -> bool:
        """Returns False when there were none in that time."""
        if self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._news,), timeout=max(0.0, timeout_s))
        return bool(done)

    def _tell(self, link: EngineLink) -> None:
        state = link.state
        before = self._told.get(link.name)
        self._told[link.name] = state
        if state is before or len(self.links) < 2:
            return
        if state is LinkState.OTHER_MODEL and link.identity and self.identity:
            _logger.error(
                "the engine at %s gets no requests, since it serves another model: %s",
                link.name,
                link.identity.difference_to(self.identity),
            )
        elif state is LinkState.READY:
            _logger.info("requests go to the engine at %s", link.name)
        elif before is not None:
            _logger.warning("no requests go to the engine at %s: it is %s", link.name, state.value)


def described(links: Iterable[EngineLink]) -> str:
    """The names, for messages: "the engine at a:1", "the engines at a:1, b:1"."""
    names = [link.name for link in links]
    return f"the engine{'s' if len(names) > 1 else ''} at {', '.join(names)}"
