"""What can be wrong with a model, as typed errors that name the thing and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.errors import (
    FailedPreconditionError,
    NotFoundError,
    PagewireError,
    UnimplementedError,
)


class ModelNotFoundError(NotFoundError):
    """No folder, file or hub repository has this name."""


class ModelFileError(FailedPreconditionError):
    """A file of the model is missing, corrupt, or does not fit its config."""


class UnsupportedModelError(UnimplementedError):
    """The files are sound, but pagewire does not serve this kind of model."""


@contextmanager
def building_from(source: str) -> Iterator[None]:
    """Whatever a config's values make fail is the config's fault: no list of checks names all that
    can be wrong with them.

    Raises:
        ModelFileError: in place of the failure.
    """
    try:
        yield
    except PagewireError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelFileError(
            f"no model can be built from {source} ({type(error).__name__}: {error}); check it, or "
            "download it again",
            field="model",
        ) from error
