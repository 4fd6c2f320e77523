"""Errors of the engine's own; the shared ones are in pagewire.errors."""

from __future__ import annotations

from pagewire.errors import FailedPreconditionError


class StartupError(FailedPreconditionError):
    """The engine can't start as it was told to; the message names the setting and the remedy."""
