"""Addresses and ports for servers, as all of pagewire's programs choose them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import listening
from pagewire.listening import (
    LOOPBACK,
    addresses_of,
    can_bind,
    check_free,
    close_all,
    free_port,
    grpc_addresses,
    listen,
)
from pagewire.settings import SettingsError

HAS_IPV6 = can_bind((socket.AF_INET6, "::1"), 0)
NOT_OURS = "192.0.2.1"  # RFC 5737: nobody's


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on, on 127.0.0.1."""
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        yield int(other.getsockname()[1])


def test_localhost_is_both_loopbacks_on_one_port() -> None:
    sockets = listen("localhost", 0, "--port")
    try:
        names = [sock.getsockname()[:2] for sock in sockets]
        assert len({port for _, port in names}) == 1
        assert [name for name, _ in names] == [LOOPBACK, "::1"][: 1 + HAS_IPV6]
        for name, port in names:
            socket.create_connection((name, port), timeout=5).close()
    finally:
        close_all(sockets)


def test_a_port_in_use_is_an_error_that_names_the_flag(taken: int) -> None:
    with pytest.raises(OSError, match=f"--http-port: port {taken} is in use"):
        listen("localhost", taken, "--http-port")
    with pytest.raises(SettingsError, match=f"--grpc-port: port {taken} is in use"):
        check_free(addresses_of("localhost"), taken, "--grpc-port")
    assert not can_bind((socket.AF_INET, LOOPBACK), taken)


def test_no_socket_is_left_open_by_a_failure(taken: int) -> None:
    with pytest.raises(OSError, match="in use"):
        grpc_addresses("localhost", taken, "--grpc-port")
    if HAS_IPV6:
        assert can_bind((socket.AF_INET6, "::1"), taken)


@pytest.mark.parametrize("host", [NOT_OURS, "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises((OSError, SettingsError), match="no address of this machine"):
        listen(host, 0, "--port")


def test_a_free_port_is_free_on_every_address() -> None:
    addresses = addresses_of("localhost")
    port = free_port(addresses)
    check_free(addresses, port, "--port")


def test_a_free_port_is_none_that_an_outgoing_connection_may_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "range"
    monkeypatch.setattr(listening, "_EPHEMERAL", told)
    for text, below in (("20000\t60999\n", 20_000), ("1024 65535", 32_768), ("", 32_768)):
        told.write_text(text)
        ports = {free_port(addresses_of("localhost")) for _ in range(50)}
        assert 10_000 <= min(ports) <= max(ports) < below
        assert len(ports) > 40, "drawn at random"


def test_no_port_is_free_on_an_address_that_is_not_ours() -> None:
    with pytest.raises(SettingsError, match=f"{NOT_OURS} is no address of this machine"):
        free_port([(socket.AF_INET, NOT_OURS)])


def test_grpc_gets_the_addresses_that_this_machine_has() -> None:
    port = free_port(addresses_of("localhost"))
    expected = [f"{LOOPBACK}:{port}", f"[::1]:{port}"][: 1 + HAS_IPV6]
    assert grpc_addresses("localhost", port, "--grpc-port") == expected
