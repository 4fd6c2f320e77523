"""Tells engines what need not run in them any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client.control import TransportError, is_session_lost
from pagewire_frontend.engine_client.link import MAX_RETRY_S, MIN_RETRY_S, EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.session import WireSession
from pagewire_frontend.engine_client.vacancy import Vacancy

_logger = logging.getLogger(__name__)


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
        if index is None and not live.proven:
            # Now: a suspect may be sent there before the task begins.
            vacancy = link.vacancy
            vacancy.begin()
            return self._spawn(self._see_off(vacancy, link, session, live, live.number, reason))
        return self._spawn(self._tell(link, session, live, live.number, index, reason))

    async def tell_of_any(self, link: EngineLink, session: WireSession, live: LiveRequest) -> None:
        """Whatever runs there under a request's id need not go on. One attempt: the request may
        have to go elsewhere meanwhile."""
        try:
            await link.control.abort(
                session.session_id, live.request.request_id, None, FinishReason.ABORT, None
            )
        except PagewireError as error:
            _logger.debug("%s may not have heard an abort: %s", link.name, error.message)

    async def _see_off(
        self,
        vacancy: Vacancy,
        link: EngineLink,
        session: WireSession,
        live: LiveRequest,
        number: int,
        reason: FinishReason,
    ) -> None:
        try:
            await self._tell(link, session, live, number, None, reason)
        finally:
            vacancy.told()

    async def _tell(
        self,
        link: EngineLink,
        session: WireSession,
        live: LiveRequest,
        number: int | None,
        index: int | None,
        reason: FinishReason,
    ) -> None:
        """A session that is over has aborted all it had. One without a connection hears when it has
        one again."""
        until = time.monotonic() + self._window_s
        delay = MIN_RETRY_S
        while session is link.session and not link.closed and time.monotonic() < until:
            if not link.connected:
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_S)
                continue
            try:
                await link.control.abort(
                    session.session_id, live.request.request_id, index, reason, number
                )
                return
            except TransportError as error:
                _logger.debug("an abort is told again to %s: %s", link.name, error.message)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_S)
            except PagewireError as error:
                if not is_session_lost(error):
                    _logger.warning("an abort was refused: %s", error)
                return
