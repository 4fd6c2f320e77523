"""TLS and mTLS at both ports of the frontend, and between frontend and engine, with certificates of
an issuer of the test's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import trustme

from pagewire import certificates
from pagewire.certificates import RenewedTls, expiries
from pagewire.errors import UnavailableError
from pagewire.settings import SettingsError
from pagewire.tls import ClientTls, ServerTls
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire_engine.errors import StartupError
from pagewire_engine.service import check_addresses
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import collect, request, wait_until_async
from tests.fakes.fake_engine import FakeEngine, fake_config
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import running_frontend
from tests.fakes.ports import free_port


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    cert: str
    key: str


@dataclass(frozen=True)
class Files:
    """An issuer, a server's pair, one of servers behind a name, a client's, and an issuer that
    nobody trusts."""

    ca: str
    server: Pair
    replicas: Pair
    client: Pair
    other_ca: str
    other_client: Pair


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("certificates")

    def issuer(name: str) -> tuple[trustme.CA, str]:
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / name)
        return ca, str(folder / name)

    def pair(ca: trustme.CA, name: str, *identities: str) -> Pair:
        issued = ca.issue_cert(*identities)
        cert, key = folder / f"{name}.crt", folder / f"{name}.key"
        for part in issued.cert_chain_pems:
            part.write_to_path(cert, append=True)
        issued.private_key_pem.write_to_path(key)
        return Pair(str(cert), str(key))

    ca, ca_path = issuer("ca.crt")
    other, other_path = issuer("other.crt")
    return Files(
        ca=ca_path,
        server=pair(ca, "server", "localhost", "127.0.0.1"),
        replicas=pair(ca, "replicas", "engines.example"),
        client=pair(ca, "client", "client@example.org"),
        other_ca=other_path,
        other_client=pair(other, "other-client", "client@example.org"),
    )


def http_context(ca: str, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


async def http_status(port: int, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context, timeout=60) as http:
        return (await http.get(f"https://127.0.0.1:{port}/v1/models")).status_code


async def grpc_code(target: str, ca: str | None, pair: Pair | None = None) -> grpc.StatusCode:
    options = [("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        tls = ClientTls(Path(ca), *((Path(pair.cert), Path(pair.key)) if pair else (None, None)))
        channel = grpc.aio.secure_channel(target, tls.grpc_credentials(), options=options)
    async with channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            await stub.ListModels(inference_pb2.ListModelsRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_both_ports_speak_tls_and_nothing_else(files: Files) -> None:
    async with running_frontend(
        FakeEngineClient(), tls_cert=files.server.cert, tls_key=files.server.key
    ) as server:
        target = f"127.0.0.1:{server.grpc_port}"
        assert await http_status(server.http_port, http_context(files.ca)) == 200
        assert await grpc_code(target, files.ca) == grpc.StatusCode.OK
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await http_status(server.http_port, http_context(files.other_ca))
        assert await grpc_code(target, files.other_ca) == grpc.StatusCode.UNAVAILABLE
        assert await grpc_code(target, None) == grpc.StatusCode.UNAVAILABLE
        async with httpx.AsyncClient(timeout=60) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://127.0.0.1:{server.http_port}/health")


async def test_with_an_issuer_of_clients_none_gets_in_without_a_certificate(
    files: Files, tmp_path: Path
) -> None:
    socket = tmp_path / "local"
    async with running_frontend(
        FakeEngineClient(),
        tls_cert=files.server.cert,
        tls_key=files.server.key,
        tls_client_ca=files.ca,
        local_socket=str(socket),
    ) as server:
        target = f"127.0.0.1:{server.grpc_port}"
        assert await http_status(server.http_port, http_context(files.ca, files.client)) == 200
        assert await grpc_code(target, files.ca, files.client) == grpc.StatusCode.OK
        for pair in (None, files.other_client):
            with pytest.raises(httpx.TransportError):
                await http_status(server.http_port, http_context(files.ca, pair))
            assert await grpc_code(target, files.ca, pair) == grpc.StatusCode.UNAVAILABLE
        # Those of this machine that may open the socket need none.
        assert await grpc_code(f"unix:{socket}", None) == grpc.StatusCode.OK


async def test_a_frontend_reaches_its_engine_by_mtls(files: Files) -> None:
    config = fake_config(
        tls_cert=files.server.cert, tls_key=files.server.key, tls_client_ca=files.ca
    )
    with FakeEngine(config) as engine:
        tls = ClientTls.from_settings("--engine-", files.ca, files.client.cert, files.client.key)
        client = RemoteEngineClient(engine.target, tls=tls)
        await client.start()
        try:
            collected = await collect(await client.submit(request("r", max_tokens=4)))
            assert len(collected.token_ids[0]) == 4
        finally:
            await client.close()
        for wrong in (None, ClientTls(Path(files.ca)), ClientTls(Path(files.other_ca))):
            stranger = RemoteEngineClient(engine.target, failover_window_s=0.3, tls=wrong)
            with pytest.raises(UnavailableError):
                await stranger.start()
            await stranger.close()


async def test_engines_behind_one_name_need_certificates_for_the_name(files: Files) -> None:
    port = free_port()
    config = {"tls_cert": files.replicas.cert, "tls_key": files.replicas.key, "port": port}

    async def resolve(name: str) -> list[str]:
        return ["127.0.0.1", "127.0.0.2"]

    with (
        FakeEngine(fake_config(**config, host="127.0.0.1")),
        FakeEngine(fake_config(**config, host="127.0.0.2")),
    ):
        tls = ClientTls(Path(files.ca))
        client = RemoteEngineClient(f"engines.example:{port}", tls=tls, resolve=resolve)
        await client.start()
        try:
            await wait_until_async(
                lambda: [each.state for each in client.statuses().engines] == ["ready"] * 2,
                "both are reached",
            )
            assert (await collect(await client.submit(request("r", max_tokens=4)))).finished
        finally:
            await client.close()
        stranger = RemoteEngineClient(
            f"others.example:{port}", failover_window_s=0.5, tls=tls, resolve=resolve
        )
        with pytest.raises(UnavailableError):
            await stranger.start()


def test_files_that_cant_be_used_are_named(files: Files, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nno\n")
    server, nowhere = files.server, str(tmp_path / "nowhere.pem")
    for arguments, wrong in [
        ((server.cert, None, None), "--tls-key"),
        ((None, None, files.ca), "--tls-cert"),
        ((nowhere, server.key, None), "--tls-cert: can't read"),
        ((server.cert, nowhere, None), "--tls-key: can't read"),
        ((server.cert, files.client.key, None), "its private key"),
        ((str(junk), server.key, None), "PEM"),
        ((server.cert, server.key, str(junk)), "--tls-client-ca"),
    ]:
        with pytest.raises(SettingsError, match=wrong):
            ServerTls.from_settings(*arguments)
    for arguments, wrong in [
        ((None, server.cert, server.key), "--engine-ca"),
        ((files.ca, server.cert, None), "--engine-key"),
        ((str(junk), None, None), "--engine-ca"),
        ((nowhere, None, None), "--engine-ca: can't read"),
    ]:
        with pytest.raises(SettingsError, match=wrong):
            ClientTls.from_settings("--engine-", *arguments)
    with pytest.raises(StartupError, match="--tls-cert: can't read"):
        check_addresses(fake_config(tls_cert=nowhere, tls_key=server.key))


def shown_at(port: int) -> bytes:
    """The certificate that a new connection is shown, whoever issued it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def der_of(cert: str) -> bytes:
    text = Path(cert).read_text()
    return ssl.PEM_cert_to_DER_cert(text[: text.index("-----END") + len(ssl.PEM_FOOTER)])


def end_of(cert: str) -> float:
    return min(expiries(Path(cert).read_bytes()))


def put(pair: Pair, into: Pair) -> None:
    """Renews a pair as Kubernetes does: other files in the same place."""
    for source, target in ((pair.cert, into.cert), (pair.key, into.key)):
        shutil.copyfile(source, target + ".new")
        os.replace(target + ".new", target)


@pytest.fixture
def served(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair that is to be renewed, by `files.replicas`; looked at each time."""
    monkeypatch.setattr(certificates, "LOOK_INTERVAL_S", 0.0)
    pair = Pair(str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))
    put(files.server, pair)
    return pair


async def test_renewed_certificates_are_shown_at_both_ports_and_running_streams_go_on(
    files: Files, served: Pair
) -> None:
    new, old = der_of(files.replicas.cert), der_of(files.server.cert)
    async with running_frontend(
        FakeEngineClient(), tls_cert=served.cert, tls_key=served.key
    ) as server:
        ports = server.http_port, server.grpc_port
        assert [await asyncio.to_thread(shown_at, port) for port in ports] == [old, old]
        context = http_context(files.ca)
        async with httpx.AsyncClient(verify=context, timeout=60) as http:
            url = f"https://127.0.0.1:{server.http_port}"
            assert (await http.get(f"{url}/v1/models")).status_code == 200
            put(files.replicas, served)
            assert [await asyncio.to_thread(shown_at, port) for port in ports] == [new, new]
            # The connection of before, which no handshake with the new name would have let in.
            assert (await http.get(f"{url}/v1/models")).status_code == 200


async def test_figures_tell_when_certificates_end(files: Files, served: Pair) -> None:
    async with running_frontend(
        FakeEngineClient(),
        tls_cert=served.cert,
        tls_key=served.key,
        tls_client_ca=files.ca,
        engine_ca=files.other_ca,
    ) as server:
        text = server._serving.metrics.render("m").decode()
    told = {
        line.split('certificate="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("pagewire_tls_certificate_expiry_timestamp_seconds{")
    }
    assert told == {
        "tls-cert": end_of(files.server.cert),
        "tls-client-ca": end_of(files.ca),
        "engine-ca": end_of(files.other_ca),
    }
    assert told["tls-cert"] > time.time()


def test_an_engine_shows_renewed_certificates_and_tells_when_they_end(
    files: Files, served: Pair
) -> None:
    config = fake_config(tls_cert=served.cert, tls_key=served.key)
    with FakeEngine(config) as engine:
        port = int(engine.target.rpartition(":")[2])
        for pair in (files.server, files.replicas):
            put(pair, served)
            assert shown_at(port) == der_of(pair.cert)


async def test_a_frontend_goes_back_to_its_engine_with_a_renewed_certificate(
    files: Files, tmp_path: Path
) -> None:
    mine = Pair(str(tmp_path / "mine.crt"), str(tmp_path / "mine.key"))
    put(files.client, mine)
    port = free_port()
    config = {"tls_cert": files.server.cert, "tls_key": files.server.key, "port": port}
    tls = ClientTls.from_settings("--engine-", files.ca, mine.cert, mine.key)
    with FakeEngine(fake_config(**config, tls_client_ca=files.ca)) as engine:
        client = RemoteEngineClient(engine.target, tls=tls)
        await client.start()
        stats = await client.stats(10.0)
        assert stats.tls_certificate_expires_at == end_of(files.server.cert)
    try:
        # The engine's next life trusts another issuer, which has renewed our certificate.
        put(files.other_client, mine)
        with FakeEngine(fake_config(**config, tls_client_ca=files.other_ca)):
            assert (await collect(await client.submit(request("r", max_tokens=4)))).finished
    finally:
        await client.close()


def test_files_that_cant_be_used_leave_the_certificate_in_use(
    files: Files, served: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ServerTls.from_settings(served.cert, served.key, None)
    assert tls is not None
    renewed = RenewedTls(tls)
    before = renewed.current()
    # Half of a pair, as one that is written file by file is for a moment.
    shutil.copyfile(files.replicas.cert, served.cert)
    assert renewed.current() is renewed.current() is before
    assert caplog.text.count("the certificate in use stays") == 1
    os.unlink(served.key)
    assert renewed.current() is before
    shutil.copyfile(files.replicas.key, served.key)
    after = renewed.current()
    assert (after.number, after.key) == (1, Path(files.replicas.key).read_bytes())


async def test_a_renewed_issuer_of_clients_decides_who_gets_in(
    files: Files, served: Pair, tmp_path: Path
) -> None:
    issuers = str(tmp_path / "clients.crt")
    shutil.copyfile(files.ca, issuers)
    async with running_frontend(
        FakeEngineClient(), tls_cert=served.cert, tls_key=served.key, tls_client_ca=issuers
    ) as server:
        target = f"127.0.0.1:{server.grpc_port}"
        for issuer, inside, outside in (
            (files.ca, files.client, files.other_client),
            (files.other_ca, files.other_client, files.client),
        ):
            shutil.copyfile(issuer, issuers)
            assert await http_status(server.http_port, http_context(files.ca, inside)) == 200
            assert await grpc_code(target, files.ca, inside) == grpc.StatusCode.OK
            with pytest.raises(httpx.TransportError):
                await http_status(server.http_port, http_context(files.ca, outside))
            assert await grpc_code(target, files.ca, outside) == grpc.StatusCode.UNAVAILABLE
