"""What `pagewire serve` prints: its services' lines, each marked with its service, and its own."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from pagewire.logs import LogFormat

_PROG = "pagewire"


class ServiceOutput:
    """Writes lines of text or of JSON.

    Args:
        log_format: "json": lines that are no JSON object yet become one.
        services: the names to mark lines with.
    """

    def __init__(self, log_format: LogFormat, services: Sequence[str]) -> None:
        self._as_json = log_format == "json"
        self._width = max(map(len, services), default=0)

    def service_line(self, service: str, line: str, is_error: bool) -> None:
        """A line that a service has written."""
        if not self._as_json:
            line = f"{service:<{self._width}} | {line}"
        elif not _is_json_object(line):
            line = _object(service, line)
        _print(line, is_error=is_error)

    def report(self, text: str) -> None:
        """A line of the supervisor's own, to standard error."""
        _print(_object(_PROG, text) if self._as_json else f"{_PROG}: {text}", is_error=True)

    def announce(self, text: str) -> None:
        """What people wait for, to standard output."""
        _print(_object(_PROG, text) if self._as_json else text, is_error=False)


def _is_json_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _object(service: str, text: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "service": service, "message": text})


def _print(line: str, *, is_error: bool) -> None:
    # Whoever read our output may have gone: no reason to stop serving.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr if is_error else sys.stdout, flush=True)
