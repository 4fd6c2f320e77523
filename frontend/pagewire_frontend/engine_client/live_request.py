"""A request from its submission to its end, across connections, lives of an engine and replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.mailbox import MAX_BACKLOG_BYTES, Mailbox
from pagewire_frontend.engine_client.routing import PromptKeys
from pagewire_frontend.engine_client.session import WireSession

if TYPE_CHECKING:
    from pagewire_frontend.engine_client.link import EngineLink
    from pagewire_frontend.engine_client.model_identity import StreamIdentity


class LiveRequest:
    """What is needed to submit a request again.

    Attributes:
        request: as it came.
        mailbox: what it has produced, and the way to its consumer.
        model: in whose tokens its prompt is, and its output, once there is any; None: of any.
        seed: the seed in force; None until an engine has named it.
        adapter_version: of its adapter, as its request or an engine has named it.
        placed: whether an engine has ever accepted it. Until then nothing was delivered.
        link: the engine where it was submitted last; None while it is nowhere.
        session: of that engine.
        number: its stream there; 0 before it was submitted anywhere.
        open_at_first: sequences that had not ended when that stream was first submitted.
        weight: what it adds to the load of that engine.
        deaths: engines that died while it was in flight, and maybe of it.
        explained: how often those before were found to tell nothing, or no more.
        died_at: tokens it had at the last.
        unseen: tokens of each sequence that the engine may have computed beyond those, at most.
        proven_in: the session in which it came through a trial.
        accepted_in: the session that has last accepted it.
        resumptions: how often another life of an engine, or another engine, has gone on with it. To
            be back after another request's trial is none.
        waiting_since: when it was last without an engine, seconds of the monotonic clock.
    """

    def __init__(
        self,
        request: EngineRequest,
        on_end: Callable[[LiveRequest], None],
        model: StreamIdentity | None = None,
    ) -> None:
        self.request = request
        params = request.sampling_params
        # A beam search can't go on from its results: elsewhere it starts over.
        whole = params.beam_search is not None
        self.mailbox = Mailbox(
            params.n,
            lambda: on_end(self),
            whole=whole,
            past=request.past,
            max_backlog_bytes=MAX_BACKLOG_BYTES,
        )
        self.model = model
        self.seed = request.sampling_params.seed
        self.adapter_version = request.adapter_version
        self.placed = False
        self.link: EngineLink | None = None
        self.session: WireSession | None = None
        self.number = 0
        self.open_at_first: list[int] = []
        self.weight = float(params.n)
        self.deaths = 0
        self.explained = 0
        self.died_at = 0
        self.unseen = 0
        self.proven_in: WireSession | None = None
        self.accepted_in: WireSession | None = None
        self.resumptions = 0
        self.waiting_since = time.monotonic()

    @cached_property
    def prompt_keys(self) -> PromptKeys:
        """Where its prompt may be cached."""
        return PromptKeys.of(self.request.prompt_token_ids, self.request.adapter)

    @property
    def has_output(self) -> bool:
        """Whether its consumer may have had something of it, or must have."""
        mailbox = self.mailbox
        return bool(self.request.past) or (
            self.placed and not mailbox.whole and mailbox.has_something
        )

    @property
    def proven(self) -> bool:
        """Whether it came through a trial in the session that it is in now."""
        return self.session is not None and self.proven_in is self.session

    @property
    def accepted(self) -> bool:
        """Whether the engine where it is now has accepted it."""
        return self.session is not None and self.accepted_in is self.session

    def explain_deaths(self, left: int) -> None:
        """So many of them count from now on."""
        self.deaths = left
        self.explained += 1

    def join(self, link: EngineLink, session: WireSession) -> None:
        """Registers a stream for it, before it is submitted there."""
        self.part()
        self.link, self.session = link, session
        self.number = session.next_number()
        records = enumerate(self.mailbox.sequences)
        self.open_at_first = [i for i, record in records if record.finish_reason is None]
        session.streams[self.number] = self.mailbox
        link.lives[self.number] = self
        link.own_load += self.weight

    def part(self) -> None:
        """Its present stream is nobody's any more."""
        link, session = self.link, self.session
        if link is None or session is None:
            return
        session.streams.pop(self.number, None)
        if link.lives.pop(self.number, None) is not None:
            link.own_load -= self.weight
            if not link.lives:
                link.own_load = 0.0  # no rest of rounding stays
        self.link = self.session = None

    def leave(self) -> None:
        """Its present stream gives nothing more; it goes on elsewhere."""
        if self.session is not None:
            self.part()
            self.waiting_since = time.monotonic()
        if not self.placed or (self.mailbox.whole and not self.mailbox.ended):
            # Nothing was delivered; and the seed of what came is not known, or it is part of a
            # beam search's results: start over.
            self.mailbox.restart()
        self.mailbox.wake()
