"""What an engine's losses have cost, counted for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FailoverCounts:
    """Since this process began.

    Attributes:
        connections_lost: connections to engines that ended without our doing.
        resumed_requests: requests handed over again with what they had produced.
    """

    connections_lost: int = 0
    resumed_requests: int = 0
