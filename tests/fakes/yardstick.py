"""A measure of time that grows as the machine slows down, for tests of what something costs."""

from __future__ import annotations

import time


def seconds_of_a_counted_loop() -> float:
    """About 20 ms of a thread's processor time on the machine this was written on."""
    begun = time.thread_time()
    for _ in range(1_000_000):
        pass
    return time.thread_time() - begun


def at_most(seconds: float) -> float:
    """What takes so many seconds of processor time at most on the machine this was written on, in
    seconds of this one, and never less. Meant for bounds that are several times what they need."""
    yardstick = max(seconds_of_a_counted_loop() for _ in range(3))
    return seconds * max(1.0, yardstick / 0.02)
