"""Deaths of engines that may turn out to be none: one was cut off, or a step of it was slow."""

from __future__ import annotations

from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.suspects import Suspects


class PresumedDeaths:
    """What was counted against requests when an engine was taken to be dead, until it is heard of.

    Args:
        suspects: where it was counted.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        # By engine: the life that was taken to be over, and of each request how often its deaths
        # had been explained by then: those that were explained since count no more.
        self._counted: dict[str, tuple[int, dict[LiveRequest, int]]] = {}

    def note(self, link: EngineLink, epoch: int, live: LiveRequest) -> None:
        """A death of this life of an engine was counted against a request."""
        known = self._counted.get(link.name)
        if known is None or known[0] != epoch:
            known = self._counted[link.name] = epoch, {}
        known[1][live] = live.explained

    def forget(self, live: LiveRequest) -> None:
        """The request has ended."""
        for name, (_, counted) in list(self._counted.items()):
            if counted.pop(live, None) is not None and not counted:
                del self._counted[name]

    def settle(self, link: EngineLink) -> None:
        """The engine has been heard of: where it is in the same life, nobody has killed it."""
        session = link.session
        if session is None or not link.answering:
            return
        epoch, counted = self._counted.pop(link.name, (0, {}))
        if session.epoch == epoch:
            for live, explained in counted.items():
                if live.explained == explained:
                    self._suspects.withdraw_death(live)
