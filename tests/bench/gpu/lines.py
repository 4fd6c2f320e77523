"""Lines of JSON between the benchmark and the programs it starts, and what they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

Line = dict[str, Any]


def answers() -> Callable[[Line], None]:
    """For a child: a function that sends a line to the benchmark.

    Libraries write to standard output as they please; from here on that is standard error.
    """
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda line: print(json.dumps(line), file=stream, flush=True)


def lines_of(arguments: Sequence[str]) -> Iterator[Line]:
    """Runs a module of the benchmark (its name and arguments), and yields its lines as they come.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"{arguments[0]} ended with status {process.returncode}")


def failure(test: str, error: Exception) -> Line:
    """The line of a test that has no result."""
    return {"test": test, "error": (str(error) or repr(error))[:500]}
