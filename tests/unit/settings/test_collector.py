"""When the cycle collector runs in a process that serves."""

from __future__ import annotations

import subprocess
import sys

_BURSTS = """
import gc
from pagewire.collector import settle_collector
if {settled}:
    settle_collector()
passes = []
gc.callbacks.append(lambda phase, info: passes.append(1) if phase == "start" else None)
for step in range(200):
    burst = [[stream] for stream in range(1000)]  # what a step makes of a thousand streams
    del burst
print(len(passes))
"""


def collections_during(*, settled: bool) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", _BURSTS.format(settled=settled)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(ran.stdout)


def test_bursts_of_objects_that_are_freed_again_start_no_collection() -> None:
    assert collections_during(settled=False) > 100
    assert collections_during(settled=True) <= 1
