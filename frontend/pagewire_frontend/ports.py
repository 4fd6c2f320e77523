"""TCP ports for servers: which are free, and on which addresses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence

from pagewire.settings import SettingsError, flag_name, port_trouble

LOOPBACK = "127.0.0.1"


def choose_ports(host: str, wanted: Mapping[str, int], taken: Mapping[str, int]) -> dict[str, int]:
    """Checks that the ports asked for are free, and chooses those that are 0.

    Args:
        host: the address that the servers will listen on, as in `FrontendConfig.host`.
        wanted: port by setting; 0 stands for any free one.
        taken: more ports by setting, checked but not chosen; 0 stands for none.

    Returns:
        `wanted` without zeros.

    Raises:
        SettingsError: a port is in use, forbidden or given twice, or the address is not ours.
    """
    addresses = addresses_of(host)
    asked = {name: port for name, port in {**wanted, **taken}.items() if port}
    flags: dict[int, str] = {}
    for name, port in asked.items():
        flag = flag_name(name)
        if port in flags:
            raise SettingsError(f"{flags[port]} and {flag} are both {port}: give them two ports")
        flags[port] = flag
        _check_free(addresses, port, flag)
    chosen: dict[str, int] = {}
    for name, port in wanted.items():
        if port:
            chosen[name] = port
            continue
        while (port := free_port(addresses)) in {*flags, *chosen.values()}:
            pass
        chosen[name] = port
    return chosen


def addresses_of(host: str) -> list[tuple[int, str]]:
    """(family, address) pairs that a server listening on `host` binds."""
    if host == "*":
        return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    if host == "localhost":
        return [(socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"--host: {host} is no address of this machine ({error})") from None
    return [(int(family), str(address[0])) for family, _, _, _, address in found]


def _bind(family: int, address: str, port: int) -> socket.socket:
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do, so that connections of a former run in TIME_WAIT don't matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address, port))
    except OSError:
        probe.close()
        raise
    return probe


def _check_free(addresses: Sequence[tuple[int, str]], port: int, flag: str) -> None:
    bound = 0
    for family, address in addresses:
        try:
            _bind(family, address, port).close()
            bound += 1
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise SettingsError(port_trouble(flag, port, error)) from None
    if not bound:
        raise SettingsError(f"--host: {addresses[0][1]} is no address of this machine")


def free_port(addresses: Sequence[tuple[int, str]]) -> int:
    """A port that is free on all the addresses this machine has of them.

    Raises:
        SettingsError: the first address is not this machine's, or no port is free.
    """
    for _ in range(100):
        family, address = addresses[0]
        try:
            with _bind(family, address, 0) as probe:
                port = int(probe.getsockname()[1])
        except OSError as error:
            raise SettingsError(
                f"--host: {address} is no address of this machine ({error.strerror})"
            ) from None
        try:
            _check_free(addresses, port, "--http-port")
        except SettingsError:
            continue
        return port
    raise SettingsError("no free port was found on this machine")
