"""What still runs when a server's grace period is over: it is ended with an error that says so,
by the same way as any other error, so that each API tells it in its own shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagewire.errors import ErrorCode, PagewireError, UnavailableError


class Shutdown:
    """Ends the work on requests at the end of the grace period.

    Attributes:
        over: whether the grace period is over.
    """

    def __init__(self) -> None:
        self.over = False
        self._running: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def bounds(self) -> AsyncIterator[None]:
        """The block is work on a request: it is cancelled when the grace period is over. Blocks of
        one task must not lie within one another.

        Raises:
            UnavailableError: the grace period is over.
        """
        if self.over:
            raise _over()
        try:
            async with asyncio.timeout(None) as timeout:
                self._running.add(timeout)
                try:
                    yield
                finally:
                    self._running.discard(timeout)
        except TimeoutError:
            if timeout.expired():
                raise _over() from None
            raise

    def end_all(self) -> int:
        """The grace period is over.

        Returns:
            How many blocks it ends.
        """
        self.over = True
        now = asyncio.get_running_loop().time()
        for timeout in self._running:
            timeout.reschedule(now)
        return len(self._running)

    def failure_of(self, error: BaseException) -> ErrorCode:
        """What a request that an error ended is counted as."""
        if isinstance(error, PagewireError):
            return error.code
        if isinstance(error, Exception):
            return ErrorCode.INTERNAL
        return ErrorCode.UNAVAILABLE if self.over else ErrorCode.CANCELLED


def _over() -> UnavailableError:
    return UnavailableError(
        "the server is shutting down, and this request ran past its grace period; send it again"
    )
