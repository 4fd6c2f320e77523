"""Typed errors that cross the wires. Each maps to one gRPC code and one HTTP status, in one place
each."""

from __future__ import annotations

from enum import IntEnum

# A status travels in gRPC's trailing metadata, as text that may triple and again in its details;
# clients refuse more than 8 KiB of that, with an error of their own.
_MOST_BYTES_TOLD = 1024


def shortened(text: str) -> str:
    """What a gRPC status can say of a text, which may quote what a client sent."""
    data = text.encode("utf-8", "replace")
    if len(data) <= _MOST_BYTES_TOLD:
        return text
    return data[:_MOST_BYTES_TOLD].decode("utf-8", "ignore") + " ..."


class ErrorCode(IntEnum):
    """The google.rpc.Code values pagewire uses."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class PagewireError(Exception):
    """Base of all errors a client can be shown.

    Attributes:
        code: what kind of error this is.
        message: what was wrong, and what to do about it.
        field: the request's field at fault ("" when none is).
        retry_after_s: seconds after which a retry makes sense, where known.
    """

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidArgumentError(PagewireError):
    """A request's field has a value that can't be served."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field=field)


class NotFoundError(PagewireError):
    """The model, adapter, session or request is not known here."""

    code = ErrorCode.NOT_FOUND


class AlreadyExistsError(PagewireError):
    """A live request has this id already."""

    code = ErrorCode.ALREADY_EXISTS


class ResourceExhaustedError(PagewireError):
    """A queue or a pool is full."""

    code = ErrorCode.RESOURCE_EXHAUSTED


class FailedPreconditionError(PagewireError):
    """The server is not set up for this; the message says which flag would."""

    code = ErrorCode.FAILED_PRECONDITION


class UnavailableError(PagewireError):
    """The engine can't be reached, and the failover window is over."""

    code = ErrorCode.UNAVAILABLE


class DeadlineExceededError(PagewireError):
    """The deadline passed before the request was served."""

    code = ErrorCode.DEADLINE_EXCEEDED


class UnimplementedError(PagewireError):
    """This model or server can't do this task."""

    code = ErrorCode.UNIMPLEMENTED


class RequestCancelledError(PagewireError):
    """Whoever asked no longer wants the answer."""

    code = ErrorCode.CANCELLED


class UnauthenticatedError(PagewireError):
    """The caller has not proven who it is, or may not do this."""

    code = ErrorCode.UNAUTHENTICATED


class InternalError(PagewireError):
    """A fault of ours."""

    code = ErrorCode.INTERNAL


_BY_CODE: dict[int, type[PagewireError]] = {
    error.code: error
    for error in (
        NotFoundError,
        AlreadyExistsError,
        ResourceExhaustedError,
        FailedPreconditionError,
        UnavailableError,
        DeadlineExceededError,
        UnimplementedError,
        RequestCancelledError,
        UnauthenticatedError,
    )
}
# What pagewire itself never sends, and a proxy or gRPC's core may.
_KIN = {
    7: ErrorCode.UNAUTHENTICATED,  # PERMISSION_DENIED
    10: ErrorCode.UNAVAILABLE,  # ABORTED
    11: ErrorCode.INVALID_ARGUMENT,  # OUT_OF_RANGE
}


def error_from_code(
    code: int, message: str, field: str = "", retry_after_s: float | None = None
) -> PagewireError:
    """The typed error for a google.rpc.Code that came over a wire; UNKNOWN, DATA_LOSS and what is
    no code are INTERNAL."""
    code = _KIN.get(code, code)
    if code == ErrorCode.INVALID_ARGUMENT:
        return InvalidArgumentError(field, message)
    kind = _BY_CODE.get(code, InternalError)
    return kind(message, field=field, retry_after_s=retry_after_s)
