"""`pagewire bench` with a tiny model in its process, and against a running frontend."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from tests.fakes.fake_engine_client import MODEL, FakeEngineClient
from tests.fakes.frontend import running_frontend
from tests.fakes.tiny_models import write_tiny_model, write_tiny_tokenizer

WORKLOAD = [
    "--num-prompts=6",
    "--prompt-len=10-20",
    "--output-len=5",
    "--max-concurrency=4",
    "--warmup=1",
]


def command(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pagewire", "bench", *WORKLOAD, *flags]


def test_a_model_is_loaded_and_measured(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    write_tiny_tokenizer(tmp_path)
    flags = [str(tmp_path), "--json", "--kv-cache-memory=4000000", "--served-model-name=tiny"]
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["requests"], told["failed"]) == ("tiny", 6, 0)
    assert told["output_tokens"] == 30
    assert 60 <= told["prompt_tokens"] <= 120
    assert told["decode"]["tokens"] == 24
    assert told["prefill"]["tokens_per_s"] > 0
    assert told["decode"]["tokens_per_s"] > 0
    latency = told["latency_s"]
    assert latency["e2e"]["p99"] >= latency["ttft"]["p50"] > 0
    assert latency["prefill"]["p50"] > 0
    assert "Output" in done.stderr  # the progress bar


async def test_a_running_frontend_is_measured() -> None:
    client = FakeEngineClient(reply=lambda request, index: "x" * 30, delay_s=0.001)
    async with running_frontend(client) as server:
        done = await asyncio.create_subprocess_exec(
            *command(f"--target=127.0.0.1:{server.grpc_port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(done.communicate(), 100)
    assert done.returncode == 0, err.decode()
    table = out.decode()
    assert f"{MODEL} (127.0.0.1:{server.grpc_port}): 6 requests in" in table
    assert "30 output tokens" in table
    assert len(client.requests) == 7


class Secured:
    """Files of a frontend that asks for a key and for a certificate."""

    def __init__(self, folder: Path) -> None:
        ca, other = trustme.CA(), trustme.CA()
        self.ca, self.other_ca = str(folder / "ca.pem"), str(folder / "other.pem")
        ca.cert_pem.write_to_path(self.ca)
        other.cert_pem.write_to_path(self.other_ca)
        self.server = self._pair(folder, "server", ca.issue_cert("127.0.0.1"))
        self.client = self._pair(folder, "client", ca.issue_cert("bench@example.org"))

    def _pair(self, folder: Path, name: str, issued: trustme.LeafCert) -> tuple[str, str]:
        cert, key = folder / f"{name}.crt", folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return str(cert), str(key)


@pytest.mark.parametrize(
    ("key", "trusts", "shows_certificate", "fault"),
    [
        ("k-1", True, True, ""),
        ("k-2", True, True, "API key"),
        ("", True, True, "API key"),
        ("k-1", True, False, "no pagewire frontend answers"),
        ("k-1", False, True, "no pagewire frontend answers"),
    ],
)
async def test_a_frontend_behind_tls_and_keys_is_measured_by_those_it_lets_in(
    tmp_path: Path, key: str, trusts: bool, shows_certificate: bool, fault: str
) -> None:
    files = Secured(tmp_path)
    config = {
        "api_key": "k-1",
        "tls_cert": files.server[0],
        "tls_key": files.server[1],
        "tls_client_ca": files.ca,
    }
    client = FakeEngineClient(reply=lambda request, index: "x" * 30)
    async with running_frontend(client, **config) as server:
        flags = [f"--target-ca={files.ca if trusts else files.other_ca}"]
        if shows_certificate:
            flags += [f"--target-cert={files.client[0]}", f"--target-key={files.client[1]}"]
        if key:
            flags.append(f"--api-key={key}")
        done = await asyncio.create_subprocess_exec(
            *command(f"--target=127.0.0.1:{server.grpc_port}", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(done.communicate(), 100)
    if fault:
        assert done.returncode == 1
        assert fault in err.decode()
        assert not client.requests
    else:
        assert done.returncode == 0, err.decode()
        assert "6 requests in" in out.decode()
        assert len(client.requests) == 7
