"""TCP addresses and ports of servers: which they bind, which are free, and why one can't be had."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from pagewire.settings import SettingsError, UnmetSettingError

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
# Ports that are chosen here lie between these two.
_LOWEST_FREE = 10_000
_USUAL_EPHEMERAL = 32_768
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

Address = tuple[int, str]
"""Family and address."""


def addresses_of(host: str) -> list[Address]:
    """What a server listening on `host` binds: both loopbacks for `localhost`, since clients differ
    in which of them it means; every address for `*`.

    Raises:
        SettingsError: the host is unknown.
    """
    if host == "*":
        return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    if host == "localhost":
        return [(socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"--host: {host} is no address of this machine ({error})") from None
    return [(int(family), str(address[0])) for family, _, _, _, address in found]


def shown_host(host: str) -> str:
    """A host that a server listens on, as people write it in an address."""
    return "localhost" if host in ("*", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host


def open_socket(family: int, address: str, port: int, *, share: bool = False) -> socket.socket:
    """A bound socket, not listening yet.

    Args:
        family, address, port: where.
        share: other sockets of this user that share too may have the port as well.

    Raises:
        OSError: it can't be bound.
    """
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        if share:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections of a former run in TIME_WAIT don't matter.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((address, port))
    except OSError:
        opened.close()
        raise
    return opened


def can_bind(address: Address, port: int) -> bool:
    """Whether a server could bind it now; port 0 asks for the address alone."""
    try:
        open_socket(*address, port).close()
    except OSError:
        return False
    return True


def check_free(addresses: Sequence[Address], port: int, flag: str) -> None:
    """Finds out before a server is started what would keep it from starting.

    Args:
        addresses: those that this machine lacks are passed over, but for all of them.
        port: 0 asks for the addresses alone.
        flag: what names the port, for the error.

    Raises:
        SettingsError: no address is this machine's.
        UnmetSettingError: the port is in use or forbidden.
    """
    bound = 0
    for family, address in addresses:
        try:
            open_socket(family, address, port).close()
            bound += 1
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise UnmetSettingError(_port_trouble(flag, port, error)) from None
    if not bound:
        raise SettingsError(f"--host: {addresses[0][1]} is no address of this machine")


def free_port(addresses: Sequence[Address]) -> int:
    """A port that is free on all the addresses this machine has of them.

    It lies below the range that the kernel takes for outgoing connections, or one of those (a
    client's to this very port, even) could have it before the server binds it, or while that is
    being restarted. Drawn at random: programs that ask at the same time get different ones.

    Raises:
        SettingsError: the first address is not this machine's, or no port is free.
    """
    check_free(addresses[:1], 0, "--port")
    below = _first_ephemeral_port()
    for _ in range(1000):
        port = random.SystemRandom().randrange(_LOWEST_FREE, below)
        try:
            check_free(addresses, port, "--port")
        except SettingsError:
            continue
        return port
    raise UnmetSettingError("no free port was found on this machine")


def _first_ephemeral_port() -> int:
    """Linux's 32768, unless the machine is set up otherwise; elsewhere it is 49152."""
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL
    # Where nearly all ports are ephemeral there is no room below them.
    return first if first > _LOWEST_FREE + 1000 else _USUAL_EPHEMERAL


def listen(host: str, port: int, flag: str, *, share: bool = False) -> list[socket.socket]:
    """Listening sockets on each address of `host`, all on one port; 0 chooses it.

    Args:
        host, port: where.
        flag: what names the port, for the error.
        share: see `open_socket`; connections are then spread over all who listen.

    Raises:
        SettingsError, OSError: as `bind`.
    """
    sockets = bind(host, port, flag, share=share)
    for opened in sockets:
        opened.listen(_BACKLOG)
        opened.setblocking(False)
    return sockets


def bind(host: str, port: int, flag: str, *, share: bool = False) -> list[socket.socket]:
    """Bound sockets on each address of `host`, as for `listen`. They keep the port.

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
            sockets.append(open_socket(family, address, port, share=share))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                missing.append(error)
                continue
            close_all(sockets)
            raise OSError(_port_trouble(flag, port, error)) from None
    if not sockets:
        raise SettingsError(f"--host: {host} is no address of this machine ({missing[0].strerror})")
    return sockets


def listen_locally(path: str) -> socket.socket:
    """A listening Unix socket at a path, in place of one that a former run left there.

    Raises:
        OSError: it can't be made.
    """
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        opened.bind(path)
    except OSError:
        opened.close()
        raise
    opened.listen(_BACKLOG)
    opened.setblocking(False)
    return opened


def close_all(sockets: Sequence[socket.socket]) -> None:
    """Closes them."""
    for opened in sockets:
        opened.close()


def grpc_addresses(host: str, port: int, flag: str, *, share: bool = False) -> list[str]:
    """The addresses for gRPC core, which binds by itself; `port` must not be 0.

    Args:
        host, port: where.
        flag: what names the port, for the error.
        share: see `open_socket`; core must be told so too.

    Raises:
        SettingsError: the host is unknown.
        OSError: the port is in use or forbidden; the text names `flag`.
    """
    # Bound and closed again: core's own error says neither which address nor why.
    sockets = bind(host, port, flag, share=share)
    names = [str(opened.getsockname()[0]) for opened in sockets]
    close_all(sockets)
    if "::" in names:
        return [f"[::]:{port}"]  # core makes this one take IPv4 too
    return [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]


def _port_trouble(flag: str, port: int, error: OSError) -> str:
    """Why a server can't listen on the port that `flag` names, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"{flag}: port {port} is in use; stop the program that has it, or choose another port "
            f"by {flag}"
        )
    if error.errno == errno.EACCES:
        return f"{flag}: this user may not use port {port}; choose one above 1023 by {flag}"
    return f"{flag}: can't listen on port {port}: {error.strerror or error}"
