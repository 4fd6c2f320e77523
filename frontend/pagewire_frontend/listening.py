"""Sockets and addresses that the frontend's two servers listen on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from pagewire.settings import port_trouble
from pagewire_frontend.ports import addresses_of, free_port

_BACKLOG = 2048


def listen(host: str, port: int, flag: str) -> list[socket.socket]:
    """Bound sockets on each address of `host`, all on one port; 0 chooses it.

    Addresses this machine lacks (::1 where IPv6 is off) are left out.

    Raises:
        SettingsError: the host is unknown, or none of its addresses is ours.
        OSError: the port is in use or forbidden; the text names `flag`.
    """
    addresses = addresses_of(host)
    port = port or free_port(addresses)
    sockets: list[socket.socket] = []
    missing: list[OSError] = []
    for family, address in addresses:
        try:
            sockets.append(_bind(family, address, port))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                missing.append(error)
                continue
            close_all(sockets)
            raise OSError(port_trouble(flag, port, error)) from None
    if not sockets:
        raise OSError(f"--host: {host} is no address of this machine ({missing[0].strerror})")
    return sockets


def _bind(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def close_all(sockets: Sequence[socket.socket]) -> None:
    """Closes them."""
    for sock in sockets:
        sock.close()


def grpc_addresses(host: str, port: int) -> list[str]:
    """The addresses for gRPC core, which binds by itself; `port` must not be 0.

    Raises:
        OSError: the port is in use or forbidden.
    """
    # Bound and closed again: core's own error says neither which address nor why.
    sockets = listen(host, port, "--grpc-port")
    names = [str(sock.getsockname()[0]) for sock in sockets]
    close_all(sockets)
    if "::" in names:
        return [f"[::]:{port}"]  # core makes this one take IPv4 too
    return [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]
