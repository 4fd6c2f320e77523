"""Ports for servers that tests start, and start again."""

from __future__ import annotations

from pagewire import listening


def free_port() -> int:
    """A port that is free on both loopbacks now; see `listening.free_port`."""
    return listening.free_port(listening.addresses_of("localhost"))
