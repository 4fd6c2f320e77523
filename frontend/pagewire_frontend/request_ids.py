"""Ids that name a request towards its client."""

from __future__ import annotations

import re
import secrets

from pagewire.errors import InvalidArgumentError

MAX_REQUEST_ID_LENGTH = 128
_ALLOWED = re.compile(r"[A-Za-z0-9._:/+=@-]+")


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return secrets.token_hex(16)


def usable_request_id(text: str) -> bool:
    """Whether a client's id is safe to log, to echo in a header and to send on."""
    return len(text) <= MAX_REQUEST_ID_LENGTH and _ALLOWED.fullmatch(text) is not None


def check_request_id(text: str) -> str:
    """A client's id, or a new one where it gave none.

    Raises:
        InvalidArgumentError: it is too long, or has characters other than letters, digits and
            `._:/+=@-`.
    """
    if not text:
        return new_request_id()
    if not usable_request_id(text):
        raise InvalidArgumentError(
            "request_id",
            f"must be at most {MAX_REQUEST_ID_LENGTH} letters, digits and ._:/+=@- characters",
        )
    return text
