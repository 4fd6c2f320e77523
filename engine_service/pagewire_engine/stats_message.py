"""The engine's figures as the control API tells them."""

from __future__ import annotations

from dataclasses import asdict

from pagewire.v1 import engine_pb2
from pagewire_engine.stats import EngineStats


def stats_message(
    stats: EngineStats, *, epoch: int, num_sessions: int = 0
) -> engine_pb2.GetStatsResponse:
    """A snapshot's message; the fields have the same names."""
    return engine_pb2.GetStatsResponse(epoch=epoch, num_sessions=num_sessions, **asdict(stats))
