"""The requests that wait for blocks, and which of them starts next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pagewire_engine.request import Request


class WaitingQueue:
    """Waiting requests in order of priority, then arrival.

    The engine's thread changes it; its length may be read from any thread.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Puts a request in line: a new one, or one that was preempted."""
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands: it starts, or has ended. One that does not wait
        is no error."""
        index = bisect_left(self._requests, request.order, key=_order)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]

    def head(self) -> Request | None:
        """The request that starts next; None when none waits."""
        return self._requests[0] if self._requests else None

    def __len__(self) -> int:
        return len(self._requests)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would start."""
        return iter(self._requests)


def _order(request: Request) -> tuple[int, int]:
    return request.order
