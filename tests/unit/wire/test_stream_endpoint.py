"""Where the delta wire listens."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pagewire_engine.errors import StartupError
from pagewire_engine.stream_endpoint import StreamEndpoint


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as opened:
        opened.linger = 0
        yield opened


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_loopback_is_a_private_ipc_path_that_goes_away(router: zmq.Socket[bytes]) -> None:
    endpoint = StreamEndpoint(None, "127.0.0.1")
    endpoint.bind(router)
    path = endpoint.advertised.removeprefix("ipc://")
    assert mode(path) == 0o600
    assert mode(os.path.dirname(path)) == 0o700
    router.close()
    endpoint.close()
    assert not Path(path).parent.exists()


def test_beyond_loopback_it_is_tcp_with_a_key(router: zmq.Socket[bytes]) -> None:
    endpoint = StreamEndpoint(None, "0.0.0.0")
    endpoint.bind(router)
    assert endpoint.advertised.startswith("tcp://*:")
    assert endpoint.curve_public_key is not None


def test_every_address_is_of_both_families(router: zmq.Socket[bytes]) -> None:
    endpoint = StreamEndpoint(None, "*")
    endpoint.bind(router)
    port = int(endpoint.advertised.removeprefix("tcp://*:"))
    hosts = ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        hosts.append("::1")
    for host in hosts:
        with socket.create_connection((host, port), timeout=10):
            pass


def test_without_ipv6_every_address_is_of_the_other_family(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = router.bind

    def bind_without(address: str) -> None:
        if router.getsockopt(zmq.IPV6):
            raise zmq.ZMQError(errno.EADDRNOTAVAIL)
        bind(address)

    monkeypatch.setattr(router, "bind", bind_without)
    endpoint = StreamEndpoint(None, "*")
    endpoint.bind(router)
    port = int(endpoint.advertised.removeprefix("tcp://*:"))
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass


def test_tcp_on_loopback_needs_no_key(router: zmq.Socket[bytes]) -> None:
    endpoint = StreamEndpoint("tcp://127.0.0.1:*", "127.0.0.1")
    endpoint.bind(router)
    assert endpoint.advertised.startswith("tcp://127.0.0.1:")
    assert endpoint.curve_public_key is None


@pytest.mark.parametrize(
    "wanted", ["http://x:1", "tcp://", "nonsense", "ipc:///no/such/folder/socket"]
)
def test_a_bad_endpoint_is_named(router: zmq.Socket[bytes], wanted: str) -> None:
    with pytest.raises(StartupError) as caught:
        StreamEndpoint(wanted, "127.0.0.1").bind(router)
    assert caught.value.field == "stream_endpoint"
