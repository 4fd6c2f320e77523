"""What a program is called in the records of its log and in traces: one name for both, by which a
collector finds what belongs together."""

from __future__ import annotations

import os
from enum import StrEnum

# OpenTelemetry's: an operator's own name for a process.
VARIABLE = "OTEL_SERVICE_NAME"


class Program(StrEnum):
    """The programs that run for as long as they are needed."""

    ENGINE = "pagewire-engine"
    FRONTEND = "pagewire-frontend"
    PAGE = "pagewire-ui"
    SUPERVISOR = "pagewire"


def service_name(program: Program) -> str:
    """The name of a program's process, as the operator has it in OTEL_SERVICE_NAME, or else its
    own."""
    return os.environ.get(VARIABLE) or program.value
