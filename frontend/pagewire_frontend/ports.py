"""The ports of the servers that `pagewire serve` starts."""

from __future__ import annotations

from collections.abc import Mapping

from pagewire.listening import addresses_of, check_free, free_port
from pagewire.settings import SettingsError, flag_name


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
        check_free(addresses, port, flag)
    chosen: dict[str, int] = {}
    for name, port in wanted.items():
        if port:
            chosen[name] = port
            continue
        while (port := free_port(addresses)) in {*flags, *chosen.values()}:
            pass
        chosen[name] = port
    return chosen
