"""Counts of values by bucket: what Prometheus calls a histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds, inclusive, ascending.
        counts: values at or below each bound and above the one before; the last: above all.
        sum: of the values.
    """

    bounds: Sequence[float] = ()
    counts: Sequence[int] = (0,)
    sum: float = 0.0


class Histogram:
    """Counts values. One thread writes; `snapshot` may be called from any.

    Args:
        bounds: upper bounds of the buckets, inclusive, ascending; one above them all is added.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, or the same one several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> HistogramCounts:
        """The counts as they are now."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._sum)
