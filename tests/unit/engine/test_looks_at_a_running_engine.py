"""Looks from other threads at what a running engine holds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from pagewire_engine.block_map import Snapshot
from tests.fakes.fake_executor import FakeExecutor
from tests.unit.engine.harness import submission
from tests.unit.engine.running_loop import TIMEOUT_S, Gate, Running


def test_a_look_shows_an_idle_engine_at_once_and_a_busy_one_between_two_steps() -> None:
    gate = Gate()
    running = Running(FakeExecutor(32, 4, on_execute=gate))
    running.loop.start()
    idle = running.loop.look(TIMEOUT_S)
    assert idle is not None
    assert (idle.step, idle.requests) == (0, [])
    running.loop.submit(submission("x", range(5), max_tokens=2))
    assert gate.entered.wait(TIMEOUT_S)
    # In a step that takes long, what was seen last.
    assert running.loop.look(0.05) is idle
    gate.open.set()
    running.answers.wait_for_end("x")
    # Looks are throttled by how long the last one took; the one that came too soon was answered
    # after the first step.
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        after = running.loop.look(TIMEOUT_S)
        assert after is not None
        if after.step == 2:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert after.requests[0].request_id == "x"
    running.loop.stop()
    assert running.loop.look(TIMEOUT_S) is after


def test_looks_take_a_bounded_share_of_the_loop_s_time(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    taken: list[float] = []
    snapshot = running.engine.snapshot

    def slow_snapshot() -> Snapshot:
        taken.append(time.monotonic())
        time.sleep(0.002)
        return snapshot()

    monkeypatch.setattr(running.engine, "snapshot", slow_snapshot)
    asked = 0
    while len(taken) < 3:
        running.loop.look(TIMEOUT_S)
        asked += 1
    assert asked > 3
    assert all(later - earlier > 0.2 for earlier, later in itertools.pairwise(taken))


def test_a_look_that_fails_harms_nobody(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    monkeypatch.setattr(running.engine, "snapshot", lambda: 1 / 0)
    assert running.loop.look(TIMEOUT_S) is None
    running.loop.submit(submission("x", range(5)))
    running.answers.wait_for_end("x")
