"""`pagewire serve` with API keys, TLS and JSON logs: its own probes and page get in as well."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.e2e.serve_process import ServeProcess
from tests.fakes.ports import free_port

KEY = {"authorization": "Bearer k-1"}


class Protected:
    """Such a server, ready."""

    def __init__(self, process: ServeProcess, ca: Path, page: str) -> None:
        self.process = process
        line = process.wait_for("pagewire is ready")
        told = json.loads(line)
        assert told["service"] == "pagewire"
        self.http = told["message"].split("OpenAI API ")[1].split("/v1")[0]
        self.page = page
        self.context = ssl.create_default_context(cafile=str(ca))


@pytest.fixture(scope="module")
def protected(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    folder = tmp_path_factory.mktemp("protected")
    ca = trustme.CA()
    issued = ca.issue_cert("localhost", "127.0.0.1")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "keys").write_text("k-1 team\n")
    page_port = free_port()
    flags = [f"--model={smollm2_path}", "--http-port=0", "--grpc-port=0", f"--ui-port={page_port}",
             "--max-model-len=256", "--kv-cache-memory=50000000", "--tls-cert=cert.pem",
             "--tls-key=key.pem", "--api-key-file=keys", "--log-format=json", "--log-requests",
             "--allow-watch-stats"]  # fmt: skip
    with ServeProcess(flags, cwd=folder) as process:
        yield Protected(process, folder / "ca.pem", f"http://127.0.0.1:{page_port}")


def test_clients_need_a_key_over_tls(protected: Protected) -> None:
    assert protected.http.startswith("https://")
    with httpx.Client(verify=protected.context, base_url=protected.http, timeout=120) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        body = {"prompt": "One, two,", "max_tokens": 4}
        assert http.post("/v1/completions", json=body, headers=KEY).status_code == 200


def test_the_page_has_a_key_of_its_own(protected: Protected) -> None:
    page = protected.process.children()["pagewire_ui.cli"]
    assert "--login" in page.cmdline()
    key = page.environ()["PAGEWIRE_API_KEY"]
    assert key not in " ".join(page.cmdline())
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(verify=protected.context, base_url=protected.http, timeout=60) as http:
        assert http.get("/v1/models", headers=headers).status_code == 200


def test_every_line_is_a_json_object(protected: Protected) -> None:
    for line in protected.process.output.splitlines():
        assert json.loads(line)["message"] is not None, line
    services = {json.loads(line)["service"] for line in protected.process.output.splitlines()}
    assert services == {"pagewire", "pagewire-engine", "pagewire-frontend", "pagewire-ui"}


def test_the_page_lets_in_those_who_have_a_key(protected: Protected) -> None:
    with httpx.Client(base_url=protected.page, timeout=60) as http:
        login = {"username": "ann"}
        assert http.get("/config").status_code == 401
        assert http.post("/login", data={**login, "password": "wrong"}).status_code == 400
        assert http.post("/login", data={**login, "password": "k-1"}).status_code == 200
        assert http.get("/config").status_code == 200
    assert urllib.request.urlopen(protected.page, timeout=30).status == 200  # the form
