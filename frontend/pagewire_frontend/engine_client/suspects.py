"""Requests in flight when an engine died, again and again: one of them may be what kills it.

A query of death stays one request's problem: those that were in flight at two deaths, without
having come past the first in between, are tried one at a time while nothing else unproven runs. One
that is on trial when the engine dies has failed, and with it the deaths are explained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pagewire.errors import InternalError, UnavailableError
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.session import WireSession

SUSPICIOUS_DEATHS = 2
# The step that killed an engine comes again within a few tokens of what was received before.
_TRIAL_TOKENS = 8
_TRIAL_TIMEOUT_S = 60.0
# A beam search tells nothing before its end: that it has lived for so long must do, since it holds
# all others up.
_WHOLE_TRIAL_TIMEOUT_S = 5.0


class Suspects:
    """Who is suspected, and who is on trial.

    Args:
        place: submits a request until an engine has accepted it.
        window_s: how long a request may be without an engine, trials of others included.
    """

    def __init__(self, place: Callable[[LiveRequest], Awaitable[None]], window_s: float) -> None:
        self._place = place
        self._window_s = window_s
        self._suspects: set[LiveRequest] = set()
        self._on_trial: LiveRequest | None = None
        self._court = asyncio.Lock()
        self._cleared = asyncio.Event()
        self._cleared.set()

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._suspects

    @property
    def cleared(self) -> bool:
        """Whether nobody is suspected."""
        return not self._suspects

    @property
    def trying(self) -> bool:
        """Whether one is on trial."""
        return self._on_trial is not None

    def on_trial_in(self, session: WireSession) -> LiveRequest | None:
        """The request on trial, if it was submitted to this session."""
        live = self._on_trial
        return live if live is not None and live.session is session else None

    def count_death(self, live: LiveRequest, trial: LiveRequest | None) -> None:
        """An engine died with this request in flight. With a suspect on trial there the others are
        not to blame."""
        if trial is not None and live is not trial:
            return
        if live.mailbox.num_tokens >= _past(live, live.died_at):
            # The step at which it was seen to die was computed since, and did no harm.
            live.deaths = 0
        live.deaths += 1
        live.died_at = live.mailbox.num_tokens
        if live.deaths < SUSPICIOUS_DEATHS:
            self.acquit(live)
        elif live is trial:
            self._convict(live)
        elif live.placed:
            self._suspects.add(live)
            self._cleared.clear()
        elif live.deaths > SUSPICIOUS_DEATHS:
            # Never accepted, it can't be tried; and twice it may have come beside another's death.
            self._convict(live)

    def _convict(self, live: LiveRequest) -> None:
        """The engine died of this one; whoever else was there has nothing to do with it."""
        for other in self._suspects:
            other.deaths = 0
        self._suspects.clear()
        self._cleared.set()
        live.mailbox.fail(InternalError("the engine died of this request each time it was tried"))

    def _prove(self, live: LiveRequest) -> None:
        live.deaths = 0
        live.proven_in = live.session

    def acquit(self, live: LiveRequest) -> None:
        """The request is proven, or has ended: nobody need wait for it."""
        self._suspects.discard(live)
        if not self._suspects:
            self._cleared.set()

    async def wait_for_verdicts(self, live: LiveRequest) -> None:
        """Returns once nobody is suspected.

        Raises:
            UnavailableError: `live`, which waits, has been without an engine for the window.
        """
        await self._within_the_window(live, self._cleared.wait())

    async def try_alone(self, live: LiveRequest) -> None:
        """Runs a suspect while nothing else unproven runs, until it has come past the point where
        it would have killed the engine again. One that is no longer suspected is just submitted.

        Raises:
            UnavailableError: its turn did not come within the window.
        """
        await self._within_the_window(live, self._court.acquire())
        if live not in self._suspects:
            self._court.release()
            await self._place(live)
            return
        self._on_trial = live
        try:
            await self._place(live)
            mailbox = live.mailbox
            enough = _past(live, mailbox.num_tokens)
            progressed = mailbox.progressed = asyncio.Event()
            limit_s = _WHOLE_TRIAL_TIMEOUT_S if mailbox.whole else _TRIAL_TIMEOUT_S
            async with asyncio.timeout(limit_s):
                while mailbox.num_tokens < enough and not mailbox.ended:
                    if live.session is None:
                        await self._place(live)
                    progressed.clear()
                    await progressed.wait()
            self._prove(live)
        except TimeoutError:
            # Slow is not deadly.
            self._prove(live)
        finally:
            live.mailbox.progressed = None
            self._on_trial = None
            self._court.release()

    async def _within_the_window(self, live: LiveRequest, event: Awaitable[object]) -> None:
        rest_s = live.waiting_since + self._window_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, rest_s)):
                await event
        except TimeoutError:
            raise UnavailableError(
                f"requests that the engine may have died of were tried one by one for "
                f"{self._window_s:g} s; send this one again",
                retry_after_s=5.0,
            ) from None


def _past(live: LiveRequest, num_tokens: int) -> int:
    """So many tokens that a death seen at `num_tokens` lies behind it for certain."""
    return num_tokens + _TRIAL_TOKENS * max(1, live.mailbox.num_open)
