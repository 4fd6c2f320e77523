"""How fast waiting requests start, and from that when it makes sense to come back."""

from __future__ import annotations

import math

# Starts are forgotten with this time constant, in seconds.
_MEMORY_S = 10.0
_SHORTEST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class StartRate:
    """A rate that decays exponentially. One thread counts; any may read."""

    def __init__(self) -> None:
        # One tuple, so that a reader never sees half of a change.
        self._state: tuple[float, float, float] | None = None

    def count(self, now: float) -> None:
        """A request starts.

        Args:
            now: seconds, monotonic.
        """
        first, rate, last = self._state or (now, 0.0, now)
        self._state = (first, rate * math.exp((last - now) / _MEMORY_S) + 1 / _MEMORY_S, now)

    def per_second(self, now: float) -> float | None:
        """Starts a second, of late; None when there has never been one."""
        if self._state is None:
            return None
        first, rate, last = self._state
        # Young, it has not seen as much as it remembers.
        seen = 1 - math.exp(min(first - now, -_SHORTEST_WAIT_S) / _MEMORY_S)
        return rate * math.exp((last - now) / _MEMORY_S) / seen

    def retry_after_s(self, num_waiting: int, now: float) -> float:
        """Seconds until half of the requests that wait will have started: sooner, others would
        still be turned away, and much later the queue might run empty. Between 1 and 60."""
        rate = self.per_second(now)
        if rate is None:
            return _SHORTEST_WAIT_S
        seconds = num_waiting / 2 / rate if rate > 0 else math.inf
        return min(max(seconds, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
