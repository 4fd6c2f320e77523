"""How programs write their logs: lines for people, or JSON for machines; and of whom."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from pagewire.service_name import Program, service_name

LogFormat = Literal["text", "json"]

# The packages whose loggers a level is about.
PACKAGES = ("pagewire", "pagewire_engine", "pagewire_frontend", "pagewire_kernels", "pagewire_ui")
# What others must have to say: h2, grpc or asyncio tell each frame and each event at debug.
_OTHERS = {"debug": "INFO", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, log_format: LogFormat, program: Program) -> None:
    """Sends the log to standard error.

    Args:
        level: the least severe one to log of pagewire's own records: debug, info, warning or error.
            Of other packages' it is one more severe at debug and info.
        log_format: "json": one object a line.
        program: told in each object, by its service's name.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(service_name(program)) if log_format == "json" else logging.Formatter(_TEXT)
    )
    logging.basicConfig(level=_OTHERS[level], handlers=[handler])
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC, ISO 8601), level, service, logger, message, what the
    record's `extra` holds under `fields`, and an exception's trace.

    Args:
        service: the name of the program's service.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)
