"""Ports for servers that tests start, and start again."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def free_port() -> int:
    """A port that is free on both loopbacks now.

    It lies below the range that the kernel takes for outgoing connections, or one of those (a
    client's to this very port, even) could have it while a server is being restarted. Drawn at
    random: suites that run at the same time, and one that asks twice, get different ones.
    """
    below = _first_ephemeral_port()
    while True:
        port = random.SystemRandom().randrange(_LOWEST, below)
        if all(_is_free(family, address, port) for family, address in _LOOPBACKS):
            return port


def _first_ephemeral_port() -> int:
    """Linux's 32768, unless the machine is set up otherwise; elsewhere it is 49152."""
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        return 32_768
    # Where nearly all ports are ephemeral there is no room below them.
    return first if first > _LOWEST + 1000 else 32_768


def _is_free(family: int, address: str, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, port))
    except OSError as error:
        # A machine without IPv6 has nobody there either.
        return error.errno in _ABSENT
    return True
