"""How the benchmark talks to an engine in a process of its own: lines of JSON over pipes.

The module imports nothing outside the standard library: it also runs in a peer's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]

# Prompts, tokens to produce for each, and how many at a time; returns the ids it produced.
Generate = Callable[[list[list[int]], int, int], list[list[int]]]


def serve(start: Callable[[], Generate]) -> None:
    """The child's side: starts the engine, then runs what it is told until stdin ends.

    Libraries write to standard output as they please; answers go to a copy of it made before.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began = time.perf_counter()
    generate = start()
    print(json.dumps({"startup_s": time.perf_counter() - began}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        began = time.perf_counter()
        outputs = generate(order["prompts"], order["new_tokens"], order["batch"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "outputs": outputs}), file=answers)


class EngineProcess:
    """The benchmark's side of one engine."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=ROOT,
            text=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - began

    def generate(
        self, prompts: list[list[int]], new_tokens: int, batch: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds it took, and the ids produced."""
        order = {"prompts": prompts, "new_tokens": new_tokens, "batch": batch}
        _pipe(self._process.stdin).write(json.dumps(order) + "\n")
        _pipe(self._process.stdin).flush()
        answer = self._answer()
        return answer["seconds"], answer["outputs"]

    def peak_rss_mb(self) -> float:
        """Peak resident memory of the process and its children, megabytes (2^20)."""
        return sum(_peak_kib(pid) for pid in _family(self._process.pid)) / 1024

    def close(self) -> None:
        """Ends the engine."""
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"an engine ended early: {' '.join(self._process.args)}")  # type: ignore[arg-type]  # a list, as given
        answer: dict[str, Any] = json.loads(line)
        return answer


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _family(pid: int) -> list[int]:
    family = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            family += _family(int(child))
    return family


def _peak_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
