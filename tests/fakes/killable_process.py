"""A program of ours in a process of its own, to be killed, stopped and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.fakes.standstill import stand_still

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0


class KillableProcess:
    """A program that says when it is ready. It may be started again after its end.

    Args:
        arguments: of the interpreter.
        ready: found in the line that says so.
        environment: beside this process's own.
    """

    def __init__(
        self, arguments: Sequence[str], ready: str, environment: dict[str, str] | None = None
    ) -> None:
        self._arguments = list(arguments)
        self._ready = re.compile(ready)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environment = os.environ | {"PYTHONPATH": path} | (environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self.ready_line: re.Match[str] | None = None

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        self._lines = []
        self.ready_line = None
        is_ready = threading.Event()
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    self._lines.append(line)
                    if self.ready_line is None and (found := self._ready.search(line)):
                        self.ready_line = found
                        is_ready.set()
            is_ready.set()

        threading.Thread(target=read, daemon=True).start()
        is_ready.wait(START_TIMEOUT_S)
        assert self.ready_line is not None, f"it did not start:\n{self.output}"

    @property
    def output(self) -> str:
        """All that it has printed since it was started."""
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def signal(self, number: int) -> None:
        """Sends a signal; after SIGSTOP it stands still."""
        assert self._process is not None
        if number == signal.SIGSTOP:
            stand_still(self.pid)
        else:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float = 120.0) -> int:
        """Waits until it has ended of itself; its status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
