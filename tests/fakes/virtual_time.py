"""An event loop without real time, in which a test decides what comes next."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

ResultT = TypeVar("ResultT")


class _Turns(selectors.DefaultSelector):  # type: ignore[misc,valid-type]  # a class, by platform
    """Asks what comes next where a loop would sleep."""

    next_event: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        self.next_event(timeout)
        return []


class VirtualTime:
    """A clock that stands still until it is moved.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def run(
        self,
        main: Callable[[], Coroutine[Any, Any, ResultT]],
        next_event: Callable[[float | None], None],
    ) -> ResultT:
        """Runs a coroutine to its end.

        Args:
            main: makes it.
            next_event: called once a turn of the loop with the seconds until its next timer, 0
                where something is ready, None where nothing is: it may move the clock.
        """
        turns = _Turns()
        turns.next_event = next_event
        loop = asyncio.SelectorEventLoop(turns)
        loop.time = lambda: self.now  # type: ignore[method-assign]
        with patch.object(time, "monotonic", lambda: self.now):
            try:
                return loop.run_until_complete(main())
            finally:
                loop.close()
