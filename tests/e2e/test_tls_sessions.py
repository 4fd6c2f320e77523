"""Clients that come back with the session of an earlier connection: it lets them in for as long as
their certificate's issuer is trusted, and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from pagewire import certificates
from tests.fakes.fake_engine import FakeEngine, fake_config
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend

HTTP_REQUEST = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
# HTTP/2's preface and empty settings; the server's settings answer it.
GRPC_REQUEST = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@dataclass(frozen=True)
class Issuers:
    """Two issuers of clients, the file that says which of them is trusted, and a server's pair."""

    trusted: Path
    first: Path
    second: Path
    server_cert: str
    server_key: str
    client_pem: str

    def trust(self, issuer: Path) -> None:
        shutil.copyfile(issuer, self.trusted)


@pytest.fixture
def issuers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issuers:
    monkeypatch.setattr(certificates, "LOOK_INTERVAL_S", 0.0)
    first, second = trustme.CA(), trustme.CA()
    first.cert_pem.write_to_path(tmp_path / "first.crt")
    second.cert_pem.write_to_path(tmp_path / "second.crt")
    server = first.issue_cert("localhost", "127.0.0.1")
    server.cert_chain_pems[0].write_to_path(tmp_path / "server.crt")
    server.private_key_pem.write_to_path(tmp_path / "server.key")
    client = first.issue_cert("client@example.org")
    client.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    made = Issuers(
        trusted=tmp_path / "clients.crt",
        first=tmp_path / "first.crt",
        second=tmp_path / "second.crt",
        server_cert=str(tmp_path / "server.crt"),
        server_key=str(tmp_path / "server.key"),
        client_pem=str(tmp_path / "client.pem"),
    )
    made.trust(made.first)
    return made


class Client:
    """A client that keeps its session.

    Attributes:
        resumed: whether the last connection took up the session of the one before.
    """

    def __init__(
        self, issuers: Issuers, version: ssl.TLSVersion, port: int, request: bytes
    ) -> None:
        self._context = ssl.create_default_context(cafile=str(issuers.first))
        self._context.load_cert_chain(issuers.client_pem)
        self._context.minimum_version = self._context.maximum_version = version
        if request is GRPC_REQUEST:
            self._context.set_alpn_protocols(["h2"])
        self._port = port
        self._request = request
        self._session: ssl.SSLSession | None = None
        self.resumed = False

    def is_served(self) -> bool:
        """Whether a new connection gets an answer."""
        with contextlib.suppress(ConnectionError, ssl.SSLError), self._connected() as connection:
            connection.sendall(self._request)
            if connection.recv(1024):
                self.resumed = bool(connection.session_reused)
                self._session = connection.session
                return True
        return False

    @contextlib.contextmanager
    def _connected(self) -> Iterator[ssl.SSLSocket]:
        with (
            socket.create_connection(("127.0.0.1", self._port), timeout=60) as plain,
            self._context.wrap_socket(
                plain, server_hostname="localhost", session=self._session
            ) as connection,
        ):
            yield connection


def served_again(client: Client) -> bool:
    return client.is_served() and not client.resumed and client.is_served() and client.resumed


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("request_bytes", [HTTP_REQUEST, GRPC_REQUEST], ids=["http", "grpc"])
async def test_no_session_outlives_the_trust_in_its_issuer(
    issuers: Issuers, version: ssl.TLSVersion, request_bytes: bytes
) -> None:
    async with running_frontend(
        FakeEngineClient(),
        tls_cert=issuers.server_cert,
        tls_key=issuers.server_key,
        tls_client_ca=str(issuers.trusted),
    ) as server:
        port = server.http_port if request_bytes is HTTP_REQUEST else server.grpc_port
        client = Client(issuers, version, port, request_bytes)
        # It does come back with its session.
        assert await asyncio.to_thread(served_again, client)
        issuers.trust(issuers.second)
        assert not await asyncio.to_thread(client.is_served)
        issuers.trust(issuers.first)
        assert await asyncio.to_thread(served_again, client)


def test_nor_does_one_at_an_engine(issuers: Issuers) -> None:
    config = fake_config(
        tls_cert=issuers.server_cert,
        tls_key=issuers.server_key,
        tls_client_ca=str(issuers.trusted),
    )
    with FakeEngine(config) as engine:
        client = Client(issuers, ssl.TLSVersion.TLSv1_3, engine.port, GRPC_REQUEST)
        assert served_again(client)
        issuers.trust(issuers.second)
        assert not client.is_served()
