"""The health check of containers: over HTTP, gRPC and TLS, by its exit status."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire_frontend.health_check import main

SERVICE = "pagewire.v1.Engine"
STATUSES = health_pb2.HealthCheckResponse


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_url_is_well_when_it_answers_200(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{url}/good"]) == 0
    assert main([f"{url}/bad"]) == 1
    assert "status 503" in capsys.readouterr().err
    assert main(["http://127.0.0.1:1/"]) == 1


@pytest.fixture
def certificates(tmp_path: Path) -> trustme.CA:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    pair = ca.issue_cert("llm-engine")
    pair.private_key_pem.write_to_path(tmp_path / "tls.key")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    return ca


@pytest.fixture
def statuses() -> health.HealthServicer:
    return health.HealthServicer()


def serve(statuses: health.HealthServicer) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    return server


def test_a_grpc_service_is_well_when_it_says_so(
    statuses: health.HealthServicer, tmp_path: Path
) -> None:
    server = serve(statuses)
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    statuses.set(SERVICE, STATUSES.SERVING)
    assert main([f"127.0.0.1:{port}", SERVICE]) == 0
    assert main([f"127.0.0.1:{port}"]) == 0
    assert main([f"unix:{tmp_path}/s", SERVICE]) == 0
    statuses.set(SERVICE, STATUSES.NOT_SERVING)
    assert main([f"127.0.0.1:{port}", SERVICE]) == 1
    assert main([f"127.0.0.1:{port}"]) == 0
    server.stop(None).wait()
    assert main([f"127.0.0.1:{port}"]) == 1


@pytest.mark.usefixtures("certificates")
def test_it_shows_a_certificate_to_a_server_that_names_another_host(
    statuses: health.HealthServicer, tmp_path: Path
) -> None:
    ca, key, cert = (tmp_path / name for name in ("ca.crt", "tls.key", "tls.crt"))
    server = serve(statuses)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], ca.read_bytes(), require_client_auth=True
    )
    target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    statuses.set(SERVICE, STATUSES.SERVING)
    trust, named = [f"--ca={ca}"], ["--server-name=llm-engine"]
    shown = [f"--cert={cert}", f"--key={key}"]
    assert main([target, SERVICE, *trust, *shown, *named]) == 0
    assert main([target, SERVICE, *trust, *shown]) == 1  # not the certificate's name
    assert main([target, SERVICE, *trust, *named]) == 1  # nothing shown
    assert main([target, SERVICE]) == 1  # no TLS
    server.stop(None).wait()


def test_files_that_can_not_be_used_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1", "--ca=/no/such/file"]) == 2
    assert "--ca" in capsys.readouterr().err
