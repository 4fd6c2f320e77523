"""What can be wrong with a model, as typed errors that name the thing and the remedy."""

from __future__ import annotations

from pagewire.errors import FailedPreconditionError, NotFoundError, UnimplementedError


class ModelNotFoundError(NotFoundError):
    """No folder, file or hub repository has this name."""


class ModelFileError(FailedPreconditionError):
    """A file of the model is missing, corrupt, or does not fit its config."""


class UnsupportedModelError(UnimplementedError):
    """The files are sound, but pagewire does not serve this kind of model."""
