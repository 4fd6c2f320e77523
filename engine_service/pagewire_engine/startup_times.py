"""Where the seconds of a start go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class StartupTimes:
    """Seconds by phase, in the order in which phases began.

    Phases follow one another; what runs beside them on other threads is not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the block as this phase; one that comes again is added to."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began

    def add(self, seconds: Mapping[str, float]) -> None:
        """Takes over the phases of a part that counted its own."""
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return dict(self._seconds)

    def __str__(self) -> str:
        """Such as `12.3 s: imports 4.0, weights 6.1, other 2.2`; phases of no length left out."""
        total = self._clock() - self._began
        other = total - sum(self._seconds.values())
        parts = [*self._seconds.items(), ("other", other)]
        shown = [f"{name} {value:.1f}" for name, value in parts if round(value, 1) > 0]
        return f"{total:.1f} s" + (f": {', '.join(shown)}" if shown else "")
