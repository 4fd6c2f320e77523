"""A real engine and a real frontend as processes that a test can kill, stop and start again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.fakes.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
# Chats with tools need one, and the tiny models' template does not tell it.
FLAGS = ("--tool-call-parser=hermes",)


class RealProcess:
    """A program that says when it is ready, at the same addresses each time it is started.

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
        """Sends a signal."""
        assert self._process is not None
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

    def __enter__(self) -> RealProcess:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


class RealEngine(RealProcess):
    """An engine with `engine_under_test`'s hooks, at one port for all its lives.

    Args:
        flags: of `engine-service`, the model among them.
        step_s: seconds that each step takes longer.
        poison: see there.
    """

    def __init__(self, *flags: str, step_s: float = 0.0, poison: str = "") -> None:
        self.port = free_port()
        super().__init__(
            ["-m", "tests.fakes.engine_under_test", f"--port={self.port}", *flags],
            "engine-service is ready",
            {"TEST_STEP_S": str(step_s), "TEST_POISON": poison, "OMP_NUM_THREADS": "1"},
        )

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Cuts the connections of its delta wire."""
        self.signal(signal.SIGUSR1)


class RealFrontend(RealProcess):
    """A frontend on free ports.

    Args:
        engine: its engine's target.
        flags: of `pagewire-frontend`.
    """

    def __init__(self, engine: str, *flags: str) -> None:
        ports = ("--http-port=0", "--grpc-port=0")
        super().__init__(
            ["-m", "pagewire_frontend.frontend_cli", f"--engine={engine}", *FLAGS, *ports, *flags],
            r"pagewire-frontend is ready: HTTP (http://\S+), gRPC (\S+)",
        )

    @property
    def http(self) -> str:
        assert self.ready_line is not None
        return self.ready_line[1]

    @property
    def grpc(self) -> str:
        assert self.ready_line is not None
        return self.ready_line[2]


class RealServe(RealProcess):
    """`pagewire serve` without a page, its engine with `engine_under_test`'s hooks.

    Args:
        flags: of `pagewire serve`, the model among them.
        step_s: seconds that each step takes longer.
        poison: see there.
    """

    def __init__(self, *flags: str, step_s: float = 0.0, poison: str = "") -> None:
        ports = ("--http-port=0", "--grpc-port=0", "--ui-port=0")
        super().__init__(
            ["-m", "tests.fakes.serve_under_test", *FLAGS, *ports, *flags],
            r"pagewire is ready: OpenAI API (http://\S+)/v1, gRPC ([^\s,]+)",
            {"TEST_STEP_S": str(step_s), "TEST_POISON": poison, "OMP_NUM_THREADS": "1"},
        )

    @property
    def http(self) -> str:
        assert self.ready_line is not None
        return self.ready_line[1]

    @property
    def grpc(self) -> str:
        assert self.ready_line is not None
        return self.ready_line[2]

    def engine(self) -> psutil.Process:
        """The engine's present process."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "tests.fakes.engine_under_test" in child.cmdline():
                    return child
        raise AssertionError("there is no engine")

    def kill(self) -> None:
        """SIGTERM first, so that its services end before it."""
        if self.alive:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(40)
        super().kill()
