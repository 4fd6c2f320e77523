"""What can be wrong with an adapter, as typed errors that name the thing and the remedy."""

from __future__ import annotations

from pagewire.errors import FailedPreconditionError, NotFoundError, UnimplementedError


class AdapterNotFoundError(NotFoundError):
    """No adapter has this name, or its folder is not there."""


class AdapterFileError(FailedPreconditionError):
    """A file of an adapter is missing, corrupt, or not of this model."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="path")


class UnsupportedAdapterError(UnimplementedError):
    """The files are sound, but pagewire does not serve this kind of adapter."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="path")
