"""Requests in flight when an engine died, again and again: one of them may be what kills it.

A query of death stays one request's problem: those that were in flight at two deaths, without
having come past the first in between, are tried one at a time while nothing else unproven runs. One
that is on trial when the engine dies has failed, and with it the deaths are explained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from pagewire.errors import InternalError, UnavailableError
from pagewire_frontend.engine_client.live_request import LiveRequest
from pagewire_frontend.engine_client.session import WireSession

_logger = logging.getLogger(__name__)

Place = Callable[[LiveRequest], Awaitable[None]]

SUSPICIOUS_DEATHS = 2
# The step that killed an engine comes again within a few tokens of what was received before: those
# of eight frames on their way, of the step that killed it, and of one launched ahead. Within more
# of them where we lagged behind the engine.
_UNSEEN_TOKENS = 10
_UNSEEN_BY_A_LAGGARD = 64
# It is not even suspected where it has come past that by far.
_HARMLESS_TOKENS = 24
_TRIAL_TIMEOUT_S = 60.0
# A beam search tells nothing before its end: that it has lived for so long must do, since it holds
# all others up.
_WHOLE_TRIAL_TIMEOUT_S = 5.0


class Suspects:
    """Who is suspected, and who is on trial.

    Args:
        window_s: how long a request may be without an engine, trials of others included.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._suspects: set[LiveRequest] = set()
        # Against whom a death counts that is not explained yet: also those that were in flight at
        # one only, or came through their trials.
        self._implicated: set[LiveRequest] = set()
        self._on_trial: LiveRequest | None = None
        self._proof_at = float("inf")
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

    def awaits_trial(self, live: LiveRequest) -> bool:
        """Whether a request may not be submitted but by `try_alone`."""
        return live in self._suspects and live is not self._on_trial

    def on_trial_in(self, session: WireSession) -> LiveRequest | None:
        """The request on trial, if it was submitted to this session."""
        live = self._on_trial
        return live if live is not None and live.session is session else None

    def count_death(
        self, live: LiveRequest, trial: LiveRequest | None, *, lagged: bool = False
    ) -> bool:
        """An engine died with this request in flight. With a suspect on trial there the others are
        not to blame.

        Args:
            live: the request.
            trial: the one that was on trial in that engine.
            lagged: whether the engine may have been far ahead of what has come of it.

        Returns:
            Whether it counts against the request.
        """
        if trial is not None and live is not trial:
            return False
        num_tokens = live.mailbox.num_tokens
        if live is trial:
            if num_tokens < self._proof_at:
                self._convict(live)
                return False
            self._prove(live)
        elif num_tokens >= _past(live, live.died_at, live.unseen + _HARMLESS_TOKENS):
            # The step at which it was seen to die was computed since, and did no harm.
            live.explain_deaths(0)
        live.deaths += 1
        live.died_at = num_tokens
        live.unseen = _UNSEEN_BY_A_LAGGARD if lagged else _UNSEEN_TOKENS
        self._implicated.add(live)
        if live.deaths < SUSPICIOUS_DEATHS:
            self.acquit(live)
        else:
            self._suspects.add(live)
            self._cleared.clear()
        return True

    def withdraw_death(self, live: LiveRequest) -> None:
        """The engine that was taken to have died with this request in flight has not."""
        live.deaths = max(0, live.deaths - 1)
        if not live.deaths:
            self._implicated.discard(live)
        if live.deaths < SUSPICIOUS_DEATHS and live is not self._on_trial:
            self.acquit(live)

    def _convict(self, live: LiveRequest) -> None:
        """The engine died of this one; whoever else was there at a death had nothing to do with it,
        suspected or not."""
        _logger.error("request %s kills the engine each time", live.request.request_id)
        for other in self._implicated:
            other.explain_deaths(0)
        self._implicated.clear()
        self._suspects.clear()
        self._cleared.set()
        live.mailbox.fail(InternalError("the engine died of this request each time it was tried"))

    def _prove(self, live: LiveRequest) -> None:
        """It is harmless as far as can be seen: another death, and it is suspected again."""
        _logger.debug("request %s has come through its trial", live.request.request_id)
        live.explain_deaths(SUSPICIOUS_DEATHS - 1)
        live.proven_in = live.session
        self.acquit(live)

    def acquit(self, live: LiveRequest) -> None:
        """The request is not suspected any more: nobody need wait for it."""
        self._suspects.discard(live)
        if not self._suspects:
            self._cleared.set()

    def forget(self, live: LiveRequest) -> None:
        """The request has ended."""
        self._implicated.discard(live)
        self.acquit(live)

    async def wait_for_verdicts(self, live: LiveRequest) -> None:
        """Returns once nobody is suspected.

        Raises:
            UnavailableError: `live`, which waits, has been without an engine for the window.
        """
        await self._within_the_window(live, self._cleared.wait())

    async def try_alone(self, live: LiveRequest, place: Place) -> None:
        """Runs a suspect while nothing else unproven runs, until it has come past the point where
        it would have killed the engine again. Returns when it is no longer suspected: then it need
        not be anywhere.

        Args:
            live: the suspect.
            place: submits it until an engine has accepted it.

        Raises:
            UnavailableError: its turn did not come within the window.
        """
        await self._within_the_window(live, self._court.acquire())
        try:
            if live in self._suspects:
                _logger.info("request %s is tried alone", live.request.request_id)
                self._on_trial = live
                await self._try(live, place)
        finally:
            self._on_trial = live.mailbox.progressed = None
            self._court.release()

    async def _try(self, live: LiveRequest, place: Place) -> None:
        mailbox = live.mailbox
        progressed = mailbox.progressed = asyncio.Event()
        limit_s = _WHOLE_TRIAL_TIMEOUT_S if mailbox.whole else _TRIAL_TIMEOUT_S
        self._proof_at = _past(live, mailbox.num_tokens, live.unseen)
        since = time.monotonic()
        while live in self._suspects and not mailbox.ended:
            if not live.accepted:
                await place(live)
                since = time.monotonic()
                continue
            if mailbox.num_tokens >= self._proof_at:
                self._prove(live)
                return
            progressed.clear()
            try:
                async with asyncio.timeout(max(0.0, since + limit_s - time.monotonic())):
                    await progressed.wait()
            except TimeoutError:
                if live.link is not None and live.link.answering:
                    self._prove(live)  # slow is not deadly
                    return
                since = time.monotonic()  # the engine has not been there to tell

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


def _past(live: LiveRequest, num_tokens: int, beyond: int) -> int:
    """So many tokens that each sequence has come that far beyond where it was at `num_tokens`."""
    return num_tokens + beyond * max(1, live.mailbox.num_open)
