"""Long work off the event loop, one piece after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class ThreadTurns:
    """Runs work in threads, one at a time, in the order in which it comes."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What the work returns. A caller that leaves before its turn takes none; its work that is
        under way keeps the turn to its end, as no thread can be stopped."""
        await self._turn.acquire()
        try:
            working = asyncio.ensure_future(asyncio.to_thread(work))
        except BaseException:
            self._turn.release()
            raise
        working.add_done_callback(self._end)
        return await asyncio.shield(working)

    def _end(self, working: asyncio.Future[ResultT]) -> None:
        self._turn.release()
        if not working.cancelled():
            working.exception()  # nobody may be there to see it
