"""What an engine's losses have cost, counted for the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FailoverCounts:
    """Since this process began.

    Attributes:
        connections_lost: connections to engines that ended without our doing.
        resumed_requests: requests handed over again with what they had produced.
        moves: requests that were submitted again, by the reason.
    """

    connections_lost: int = 0
    resumed_requests: int = 0
    moves: Counter[str] = field(default_factory=Counter)
