"""A process that is made to stand still, every thread of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

# For what takes a moment, once the machine lets the process take its signal.
_TIMEOUT_S = 60.0


def stand_still(pid: int) -> None:
    """Sends SIGSTOP, and returns when no thread runs any more.

    One thread takes the signal, when the machine runs it; on a busy one the others go on till
    then, and answer what was asked after the signal was sent.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _TIMEOUT_S
    while running := _states(pid) - set("TtZX"):
        assert time.monotonic() < deadline, f"threads of {pid} still run: {running}"
        time.sleep(0.001)


def _states(pid: int) -> set[str]:
    """What `ps` calls the states of its threads."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            told = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        # After the program's name, which may have any characters.
        states.add(told.rpartition(")")[2].split()[0])
    return states
