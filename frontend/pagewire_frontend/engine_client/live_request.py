"""A request from its submission to its end, across connections and lives of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.mailbox import MAX_BACKLOG_BYTES, Mailbox
from pagewire_frontend.engine_client.session import WireSession


class LiveRequest:
    """What is needed to submit a request again.

    Attributes:
        request: as it came.
        mailbox: what it has produced, and the way to its consumer.
        seed: the seed in force; None until an engine has named it.
        adapter_version: of its adapter, as its request or an engine has named it.
        placed: whether an engine has ever accepted it. Until then nothing was delivered.
        session: where it was submitted last; None while it is nowhere.
        number: its stream there.
        deaths: engines that died while it was in flight, and maybe of it.
        died_at: tokens it had then.
        resumptions: how often it was accepted again, with what it had produced.
        waiting_since: when it was last without an engine, seconds of the monotonic clock.
    """

    __slots__ = (
        "adapter_version",
        "deaths",
        "died_at",
        "mailbox",
        "number",
        "placed",
        "request",
        "resumptions",
        "seed",
        "session",
        "waiting_since",
    )

    def __init__(self, request: EngineRequest, on_end: Callable[[LiveRequest], None]) -> None:
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
        self.seed = request.sampling_params.seed
        self.adapter_version = request.adapter_version
        self.placed = False
        self.session: WireSession | None = None
        self.number = 0
        self.deaths = 0
        self.died_at = 0
        self.resumptions = 0
        self.waiting_since = time.monotonic()

    def join(self, session: WireSession) -> None:
        """Registers a stream for it, before it is submitted there."""
        self.session = session
        self.number = session.next_number()
        session.streams[self.number] = self.mailbox

    def leave(self) -> None:
        """Its present stream gives nothing more."""
        if self.session is not None:
            self.session.streams.pop(self.number, None)
            self.session = None
            self.waiting_since = time.monotonic()
        if not self.placed or (self.mailbox.whole and not self.mailbox.ended):
            # Nothing was delivered; and the seed of what came is not known, or it is part of a
            # beam search's results: start over.
            self.mailbox.restart()
        self.mailbox.wake()
