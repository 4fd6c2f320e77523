"""Validators of settings that several programs have: an address, a URL, logins, a path."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import SecretStr


@dataclass(frozen=True, slots=True)
class Guard:
    """Marks a setting, by `Annotated`, that keeps somebody out. A variable of it that is set and
    empty is refused: a secret that was not filled in must not open the server. Every `SecretStr`
    is such a setting without the mark."""


def check_host_port(value: str) -> str:
    """`value` if it is an address such as 127.0.0.1:50061 or [::1]:50061.

    Raises:
        ValueError: it is not.
    """
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:50061")
    return value


def check_url(value: str | None) -> str | None:
    """`value` if it is none, or the URL of a server, such as http://localhost:4317.

    Raises:
        ValueError: it is not.
    """
    scheme, _, rest = (value or "").partition("://")
    if value is not None and (scheme not in ("http", "https") or not rest.split("/", 1)[0]):
        raise ValueError("must be a URL, such as http://localhost:4317")
    return value


def check_api_key(value: SecretStr | None) -> SecretStr | None:
    """`value` if it can be sent as a key.

    Raises:
        ValueError: it can't; the message does not tell the secret.
    """
    if value is not None and not all("!" <= each <= "~" for each in value.get_secret_value()):
        raise ValueError("must be one API key, of ASCII characters other than spaces")
    return value


def check_logins(value: SecretStr | None) -> SecretStr | None:
    """`value` if it is USER:PASSWORD, or several of them separated by commas.

    Raises:
        ValueError: it is not; the message does not tell the secret.
    """
    for pair in value.get_secret_value().split(",") if value is not None else ():
        user, _, password = pair.partition(":")
        if not user or not password:
            raise ValueError("must be USER:PASSWORD, or several of them separated by commas")
    return value


def check_root_path(value: str) -> str:
    """`value` without a slash at its end if it is a path such as /chat, or "".

    Raises:
        ValueError: it is neither.
    """
    if value and not re.fullmatch(r"(/[\w.~-]+)+/?", value, re.ASCII):
        raise ValueError("must be a path such as /chat")
    return value.rstrip("/")
