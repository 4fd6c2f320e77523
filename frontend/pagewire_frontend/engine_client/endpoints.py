"""Where the engines are: addresses as they were given, or those that a DNS name stands for."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

_logger = logging.getLogger(__name__)

# A name's addresses, as text.
Resolve = Callable[[str], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where one engine is called.

    Attributes:
        address: HOST:PORT.
        certified_name: the host that its certificate names, where it is not that of the address.
    """

    address: str
    certified_name: str | None = None


async def resolve(host: str) -> list[str]:
    """The addresses of a host by the system's resolver.

    Raises:
        OSError: there are none, or none can be asked for.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(slots=True)
class Endpoints:
    """Engines as they were named.

    A name with several addresses of one family (a headless service of Kubernetes) stands for an
    engine at each. A name with one is called by its name, as ever: gRPC looks it up again whenever
    it connects.

    Attributes:
        named: HOST:PORT, each.
        resolve: finds a name's addresses.
    """

    named: Sequence[str]
    resolve: Resolve = resolve
    _known: dict[str, list[Target]] = field(default_factory=dict)

    @property
    def change(self) -> bool:
        """Whether there is a name whose addresses may change."""
        return any(_is_name(host_and_port(each)[0]) for each in self.named)

    async def targets(self) -> dict[str, Target]:
        """The engines there are now, by HOST:PORT. A name that can't be resolved stands for what it
        stood for before: an outage of the DNS is none of the engines."""
        found: dict[str, Target] = {}
        for each in self.named:
            for target in await self._targets_of(each):
                found.setdefault(target.address, target)
        return found

    async def _targets_of(self, named: str) -> list[Target]:
        host, port = host_and_port(named)
        if not _is_name(host):
            return [Target(named)]
        try:
            addresses = await self.resolve(host)
        except OSError as error:
            _logger.debug("the addresses of %s are not known: %s", host, error)
            addresses = []
        if not addresses:
            return self._known.get(named, [Target(named)])
        families = _by_family(addresses)
        if max(map(len, families)) < 2:
            targets = [Target(named)]
        else:
            # An engine of a dual-stack host would be there twice: one family will do.
            several = max(families, key=len)
            targets = [Target(_joined(address, port), host) for address in sorted(several)]
        self._known[named] = targets
        return targets


def host_and_port(address: str) -> tuple[str, str]:
    """The two parts of HOST:PORT, the host without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _is_name(host: str) -> bool:
    if host == "localhost":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _by_family(addresses: Sequence[str]) -> tuple[list[str], list[str]]:
    four = [address for address in addresses if ":" not in address]
    six = [address for address in addresses if ":" in address]
    return four, six


def _joined(address: str, port: str) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
