"""What `pagewire serve` prints: its services' lines, each marked with its service, and its own."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from pagewire.logs import LogFormat
from pagewire.service_name import Program, service_name


class ServiceOutput:
    """Writes lines of text or of JSON.

    Args:
        log_format: "json": lines that are no JSON object yet become one.
        services: the names to mark lines of text with, and which program each is.
        program: whose own reports there are besides.
    """

    def __init__(
        self, log_format: LogFormat, services: Mapping[str, Program], program: Program
    ) -> None:
        self._as_json = log_format == "json"
        self._programs = services
        self._program = program
        self._width = max(map(len, services), default=0)

    def service_line(self, service: str, line: str, is_error: bool) -> None:
        """A line that a service has written."""
        if not self._as_json:
            line = f"{service:<{self._width}} | {line}"
        elif not _is_json_object(line):
            line = _object(self._programs[service], line)
        _print(line, is_error=is_error)

    def report(self, text: str) -> None:
        """A line of the supervisor's own, to standard error."""
        line = _object(self._program, text) if self._as_json else f"{self._program}: {text}"
        _print(line, is_error=True)

    def announce(self, text: str) -> None:
        """What people wait for, to standard output."""
        _print(_object(self._program, text) if self._as_json else text, is_error=False)


def _is_json_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _object(program: Program, text: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "service": service_name(program), "message": text})


def _print(line: str, *, is_error: bool) -> None:
    # Whoever read our output may have gone: no reason to stop serving.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr if is_error else sys.stdout, flush=True)
