"""Bytes that are no message, which gRPC's servers otherwise answer with an error of their own and a
traceback in the log: a stranger's mistake, and not the server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import DecodeError

from pagewire.errors import InvalidArgumentError


class _Malformed:
    """Stands where a request would."""


MALFORMED: Final = _Malformed()


def tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A request deserializer that gives `MALFORMED` for what can't be read."""

    def read(data: bytes) -> Any:
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except DecodeError:
            return MALFORMED

    return read


def malformed_error() -> InvalidArgumentError:
    """What the caller is told."""
    return InvalidArgumentError(
        "", "the request's bytes are no message of this call's type, or were cut off"
    )
