"""Errors of the engine's own; the shared ones are in pagewire.errors."""

from __future__ import annotations

from pagewire.errors import ErrorCode, FailedPreconditionError


class StartupError(FailedPreconditionError):
    """The engine can't start as it was told to; the message names the setting and the remedy."""


class UnmetStartupError(StartupError):
    """What it was told to use is not there now, as a port that is free. It may be later."""

    code = ErrorCode.UNAVAILABLE
