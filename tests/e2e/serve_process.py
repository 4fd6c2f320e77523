"""Runs `pagewire serve` for a test, and tells what it prints and which processes it has."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

MODEL = "SmolLM2-135M-Instruct"


class ServeProcess:
    """`pagewire serve` with these flags, in a fresh environment but for `env`."""

    def __init__(
        self, flags: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagewire", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=os.environ | (env or {}),
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        """All that it has printed, on either stream."""
        with self._news:
            return "\n".join(self._lines)

    def wait_for(self, text: str, *, timeout_s: float = 120.0, occurrence: int = 1) -> str:
        """The line with `text` (the n-th such line), once it is printed."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                found = [line for line in self._lines if text in line]
                if len(found) >= occurrence:
                    return found[occurrence - 1]
                left = deadline - time.monotonic()
                ended = not self._reader.is_alive()
                if left <= 0 or ended:
                    printed = "\n".join(self._lines)
                    raise AssertionError(f"{text!r} was not printed, but:\n{printed}")
                self._news.wait(min(left, 1.0))

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the supervisor alone."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit status."""
        status = self._process.wait(timeout_s)
        self._reader.join(10)
        return status

    def children(self) -> dict[str, psutil.Process]:
        """The services by the module they run; not those that are just starting or ending."""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, ValueError, IndexError):
                command = child.cmdline()
                found[command[command.index("-m") + 1]] = child
        return found

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._reader.join(10)
            self._process.stdout.close()


class Served:
    """A running `pagewire serve` and where its parts answer."""

    def __init__(self, process: ServeProcess) -> None:
        self.process = process
        line = process.wait_for("pagewire is ready")
        addresses = re.fullmatch(
            r"pagewire is ready: OpenAI API (http://localhost:\d+)/v1, gRPC (localhost:\d+), "
            r"chat page (http://localhost:\d+)",
            line,
        )
        assert addresses is not None, line
        self.http, self.grpc, self.page = addresses.groups()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.http + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        with self.post("/v1/chat/completions", body) as answer:
            return dict(json.load(answer))
