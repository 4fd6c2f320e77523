"""Which engine a request may go to, and which of those it goes to."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire_frontend.engine_client.fleet import Fleet
from pagewire_frontend.engine_client.link import EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.routing import Candidate, Router, weight
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.engine_client.suspects import Suspects


class Placement:
    """The rules around the router: model, adapter, and the trials of suspects.

    Args:
        fleet: the engines.
        suspects: requests that may be what kills engines.
    """

    def __init__(self, fleet: Fleet, suspects: Suspects) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self._router = Router()
        self._court: EngineLink | None = None

    def choose(self, live: LiveRequest) -> EngineLink | None:
        """The engine to submit a request to; None while there is none."""
        link = live.link
        if link is not None and live.session is link.session and link.usable:
            return link  # it may have arrived there already
        if live.link is not None:
            return None  # until that engine is back, or it was taken from it
        links = self._open_to(live)
        if live in self._suspects:
            court = self._court
            return court if court in links and court.vacancy.clear else None
        if not self._suspects.cleared:
            if len(links) == 1:
                return None  # it is the only one for the trials
            court = self._court if self._suspects.trying else None
            links = [link for link in links if link is not court]
        if not links:
            return None
        return links[0] if len(self._fleet.links) == 1 else self._routed(live, links)

    def join(self, live: LiveRequest, link: EngineLink, session: WireSession) -> None:
        """A request is about to be submitted to an engine."""
        identity = link.identity
        if identity is not None and not live.has_output:
            live.model = identity.stream
        link.num_routed += 1
        if len(self._fleet.links) > 1:
            prompt = live.prompt_keys
            cached = self._router.cached_tokens(prompt).get(link.name, 0)
            live.weight = weight(prompt.num_tokens, cached, live.request.sampling_params.n)
            self._router.note(prompt, link.name)
        live.join(link, session)

    def has_model(self, live: LiveRequest) -> bool:
        """Whether a request could be served by the model that is served now, in tokens at least."""
        identity = self._fleet.identity
        if identity is None or live.model is None or live.model is identity.stream:
            return True
        if live.model == identity.stream:
            return True
        return not live.has_output and live.model.reads_alike(identity.stream)

    def has_another(self, live: LiveRequest, than: EngineLink) -> bool:
        """Whether another engine would take a request that runs in one."""
        return any(link is not than for link in self._open_to(live))

    def forget_cache_of(self, link: EngineLink, gone: bool) -> None:
        """What an engine had cached went with its life."""
        if gone:
            self._router.forget(link.name)

    def waits_for_verdicts(self, live: LiveRequest) -> bool:
        """Whether a request waits only for trials of others to end."""
        return (
            not self._suspects.cleared
            and live not in self._suspects
            and live.link is None
            and bool(self._open_to(live))
        )

    def make_room_for(self, live: LiveRequest) -> list[LiveRequest]:
        """Requests that must leave their engine, since a suspect is to be tried with nothing
        unproven beside it. None where it is no suspect, or there is such an engine. Chooses where
        it is to be tried."""
        if live not in self._suspects or live.link is not None:
            return []
        links = self._open_to(live)
        if not links:
            return []
        free = [link for link in links if not _unproven(link)]
        self._court = next(iter(free), None) or min(links, key=lambda link: link.own_load)
        return _unproven(self._court)

    def _open_to(self, live: LiveRequest) -> list[EngineLink]:
        """Engines that take requests, and may take this one."""
        links = self._fleet.usable
        if not links or not self.has_model(live):
            return []
        adapter = live.request.adapter
        if adapter and len(links) > 1:
            # Where none has it, any of them says so.
            version = live.adapter_version
            return [
                link
                for link in links
                if adapter in link.adapters and version in ("", link.adapters[adapter])
            ] or links
        return links

    def _routed(self, live: LiveRequest, links: Sequence[EngineLink]) -> EngineLink:
        candidates = [Candidate(link.name, link.load) for link in links]
        name = self._router.choose(live.prompt_keys, candidates)
        return next(link for link in links if link.name == name)


def _unproven(link: EngineLink) -> list[LiveRequest]:
    return [live for live in link.lives.values() if not live.proven]
