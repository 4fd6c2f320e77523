"""Logging at a bounded rate, for what strangers can trigger."""

from __future__ import annotations

import logging
import time


class LimitedLog:
    """Passes one message in `interval_s` and counts those it swallowed.

    Args:
        logger: where to.
        interval_s: seconds between messages.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._quiet_until = 0.0
        self._swallowed = 0

    def warning(self, message: str, *args: object) -> None:
        """Logs a warning, if it is time for one."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._swallowed += 1
            return
        if self._swallowed:
            message += f" ({self._swallowed} more like it were not logged)"
        self._swallowed = 0
        self._quiet_until = now + self._interval_s
        self._logger.warning(message, *args)
