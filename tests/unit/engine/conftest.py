"""Engines that run on threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.running_loop import Running


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts loops, and stops them after the test."""
    started: list[Running] = []

    def start_loop(executor: FakeExecutor | None = None, **changes: Any) -> Running:
        running = Running(executor or FakeExecutor(32, 4), **changes)
        running.loop.start()
        started.append(running)
        return running

    yield start_loop
    for running in started:
        running.loop.stop()
        running.engine.queues.blocks.check()
