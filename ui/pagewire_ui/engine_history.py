"""What the engine did over the last minutes: rates and times out of counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagewire.v1 import engine_pb2

# Moments that are kept: five minutes of one a second.
MAX_MOMENTS = 300
# Of two moments nearer than this one step's tokens would look like a rate without end.
_MIN_GAP_S = 1e-3
# Between two moments further apart nobody looked; nothing is drawn there.
_MAX_GAP_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The engine's counters as they were told once.

    Attributes:
        at_s: on the watcher's monotonic clock.
        epoch: of the engine; its counters begin again with each.
        num_generated, num_prompt: tokens since the engine's start.
        num_first_tokens, first_token_sum_s: requests that had their first token, and the seconds
            until then added up.
        num_running, num_waiting, num_swapped: requests.
    """

    at_s: float
    epoch: int
    num_generated: int
    num_prompt: int
    num_first_tokens: int
    first_token_sum_s: float
    num_running: int
    num_waiting: int
    num_swapped: int

    @classmethod
    def of(cls, stats: engine_pb2.GetStatsResponse, at_s: float) -> Moment:
        """The moment that a message tells of."""
        first_token = stats.time_to_first_token
        return cls(
            at_s,
            stats.epoch,
            stats.num_generation_tokens,
            stats.num_prompt_tokens,
            sum(first_token.counts),
            first_token.sum,
            stats.num_running,
            stats.num_waiting,
            stats.num_swapped,
        )


# (seconds before the last moment, value); None: a gap.
Series = list[tuple[float, float] | None]


class EngineHistory:
    """The last moments, the oldest first."""

    def __init__(self, moments: Iterable[Moment] = ()) -> None:
        self._moments: deque[Moment] = deque(moments, maxlen=MAX_MOMENTS)

    def add(self, moment: Moment) -> None:
        """Another moment, later than all."""
        self._moments.append(moment)

    def moments(self) -> Sequence[Moment]:
        """A copy."""
        return tuple(self._moments)


def generated_per_s(moments: Sequence[Moment]) -> Series:
    """Produced tokens a second."""
    return _rates(moments, [moment.num_generated for moment in moments])


def prompt_per_s(moments: Sequence[Moment]) -> Series:
    """Prompt tokens computed a second."""
    return _rates(moments, [moment.num_prompt for moment in moments])


def first_token_s(moments: Sequence[Moment]) -> Series:
    """Mean seconds to the first token, of the requests that ended since the moment before; a gap
    where none did."""
    series: Series = []
    for before, after in pairwise(moments):
        count = after.num_first_tokens - before.num_first_tokens
        if not _follows(before, after) or count <= 0:
            series.append(None)
            continue
        mean = (after.first_token_sum_s - before.first_token_sum_s) / count
        series.append((moments[-1].at_s - after.at_s, max(0.0, mean)))
    return series


def counts(moments: Sequence[Moment], name: str) -> Series:
    """One of a moment's numbers of requests over time; a gap where nobody looked."""
    series: Series = []
    for before, moment in zip([None, *moments], moments, strict=False):
        if before is not None and moment.at_s - before.at_s > _MAX_GAP_S:
            series.append(None)
        series.append((moments[-1].at_s - moment.at_s, float(getattr(moment, name))))
    return series


def _rates(moments: Sequence[Moment], totals: Sequence[int]) -> Series:
    series: Series = []
    for (before, after), (least, most) in zip(pairwise(moments), pairwise(totals), strict=True):
        if not _follows(before, after) or most < least:
            series.append(None)
            continue
        rate = (most - least) / (after.at_s - before.at_s)
        series.append((moments[-1].at_s - after.at_s, rate))
    return series


def _follows(before: Moment, after: Moment) -> bool:
    return before.epoch == after.epoch and _MIN_GAP_S <= after.at_s - before.at_s <= _MAX_GAP_S
