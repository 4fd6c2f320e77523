"""Tells engines what need not run in them any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client.control import TransportError, is_session_lost
from pagewire_frontend.engine_client.link import MAX_RETRY_S, MIN_RETRY_S, EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.engine_client.vacancy import Vacancy

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Departure:
    """What need not run in an engine any more.

    Attributes:
        link, session: the engine, and our session in it.
        request_id: of the request.
        number: its stream; None: whichever has the id.
        index: of its sequences the one; None: all of it.
        reason: why.
    """

    link: EngineLink
    session: WireSession
    request_id: str
    number: int | None = None
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT

    async def abort(self) -> None:
        """Tells the engine, once.

        Raises:
            PagewireError: it may not have heard, or refuses.
        """
        await self.link.control.abort(
            self.session.session_id, self.request_id, self.index, self.reason, self.number
        )


class Departures:
    """Aborts, each told until the engine has heard it.

    Each names the stream: one that is late must not end what was submitted again meanwhile.

    Args:
        spawn: runs a task until the client is closed.
        window_s: for how long an engine that does not answer is told.
    """

    def __init__(
        self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], window_s: float
    ) -> None:
        self._spawn = spawn
        self._window_s = window_s

    def tell(
        self,
        live: LiveRequest,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> asyncio.Task[None] | None:
        """A request, or one of its sequences, need not go on where it is now.

        Returns:
            The task that tells the engine; None where there is none to be told.
        """
        link, session = live.link, live.session
        if link is None or session is None:
            return None
        departure = Departure(link, session, live.request.request_id, live.number, index, reason)
        if index is None and not live.proven:
            # Now: a suspect may be sent there before the task begins.
            link.vacancy.begin()
            return self._spawn(self._see_off(departure, link.vacancy))
        return self._spawn(self._tell(departure))

    async def tell_of_any(self, link: EngineLink, session: WireSession, live: LiveRequest) -> None:
        """Whatever runs there under a request's id need not go on. One attempt: the request may
        have to go elsewhere meanwhile."""
        try:
            await Departure(link, session, live.request.request_id).abort()
        except PagewireError as error:
            _logger.debug("%s may not have heard an abort: %s", link.name, error.message)

    async def _see_off(self, departure: Departure, vacancy: Vacancy) -> None:
        try:
            await self._tell(departure)
        finally:
            vacancy.told()

    async def _tell(self, departure: Departure) -> None:
        """A session that is over has aborted all it had. One without a connection hears when it has
        one again."""
        link, session = departure.link, departure.session
        until = time.monotonic() + self._window_s
        delay = MIN_RETRY_S
        while session is link.session and not link.closed and time.monotonic() < until:
            if link.connected:
                try:
                    await departure.abort()
                    return
                except TransportError as error:
                    _logger.debug("an abort is told again to %s: %s", link.name, error.message)
                except PagewireError as error:
                    if not is_session_lost(error):
                        _logger.warning("an abort was refused: %s", error)
                    return
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_S)
