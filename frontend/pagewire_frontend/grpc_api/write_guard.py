"""Streaming calls whose client does not read: they are ended, and what they hold is freed."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from pagewire.errors import ResourceExhaustedError
from pagewire_frontend.serving import Serving

logger = logging.getLogger(__name__)

# A client is cut off this part of the timeout late at most.
_CHECKS_PER_TIMEOUT = 4


class WriteGuard:
    """Writes a call's messages. As a context it ends the block with ResourceExhaustedError when the
    client has let a message wait for longer than `--slow-client-timeout-s`.

    One timer a call rather than one a message: messages are many.

    Args:
        context: of the call.
        serving: knows the timeout, and counts.
    """

    __slots__ = ("_loop", "_serving", "_task", "_timed_out", "_timer", "_waiting_since", "_write")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], serving: Serving) -> None:
        self._write = context.write
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = float("inf")
        self._timed_out = False

    async def write(self, message: Message) -> None:
        """Returns when the transport has taken the message. It is serialised before the first yield
        to the event loop: the caller may refill it."""
        self._waiting_since = self._loop.time()
        await self._write(message)
        self._waiting_since = float("inf")

    async def __aenter__(self) -> WriteGuard:
        self._task = asyncio.current_task()
        self._check()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._timed_out or self._task is None:
            return
        # Unless the call was cancelled besides: then its client has left.
        if self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            timeout_s = self._serving.config.slow_client_timeout_s
            self._serving.metrics.slow_client_cut_off("grpc")
            logger.warning("a gRPC client read nothing for %g s: its call is ended", timeout_s)
            raise ResourceExhaustedError(
                f"the client read nothing for {timeout_s:g} s, and its answer was waiting; read as "
                "messages come, or ask for less"
            ) from None

    def _check(self) -> None:
        timeout_s = self._serving.config.slow_client_timeout_s
        if self._loop.time() - self._waiting_since >= timeout_s:
            self._timed_out = True
            if self._task is not None:
                self._task.cancel()
            return
        self._timer = self._loop.call_later(timeout_s / _CHECKS_PER_TIMEOUT, self._check)
