"""A real engine and a real frontend as processes that a test can kill, stop and start again."""

from __future__ import annotations

import contextlib
import signal
import subprocess

import psutil

from tests.fakes.killable_process import KillableProcess
from tests.fakes.ports import free_port

# Chats with tools need one, and the tiny models' template does not tell it.
FLAGS = ("--tool-call-parser=hermes",)


class RealEngine(KillableProcess):
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


class RealFrontend(KillableProcess):
    """A frontend on free ports.

    Args:
        engine: its engine's target.
        flags: of `pagewire-frontend`.
    """

    def __init__(self, engine: str, *flags: str) -> None:
        ports = ("--http-port=0", "--grpc-port=0")
        super().__init__(
            ["-m", "pagewire_frontend.frontend_cli", f"--engine={engine}", *FLAGS, *ports, *flags],
            r"pagewire-frontend is ready: HTTP (https?://\S+), gRPC (\S+)",
        )

    @property
    def http(self) -> str:
        assert self.ready_line is not None
        return self.ready_line[1]

    @property
    def grpc(self) -> str:
        assert self.ready_line is not None
        return self.ready_line[2]


class RealServe(KillableProcess):
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
