"""Errors of the engine's own; the shared ones are in pagewire.errors."""

from __future__ import annotations

from pagewire.errors import ErrorCode, FailedPreconditionError, PagewireError


class StartupError(FailedPreconditionError):
    """The engine can't start as it was told to; the message names the setting and the remedy."""


class UnauthenticatedError(PagewireError):
    """The secret is not the session's."""

    code = ErrorCode.UNAUTHENTICATED


class CancelledError(PagewireError):
    """The caller has gone."""

    code = ErrorCode.CANCELLED
