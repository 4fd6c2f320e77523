"""A client in C++, built from the .proto files with Debian's gRPC, against the real model."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire_frontend.model_download import cache_dir
from tests.clients.conftest import RunningServer

ROOT = Path(__file__).resolve().parents[2]
CPP_CLIENT = Path(__file__).resolve().parent / "cpp"
QUESTION = "What is the capital of France?"
# Debian's packages of what the C++ client is built with, by a file of each.
CPP_PACKAGES = {
    "libgrpc++-dev": "/usr/include/grpcpp/grpcpp.h",
    "protobuf-compiler-grpc": "/usr/bin/grpc_cpp_plugin",
    "protobuf-compiler": "/usr/bin/protoc",
    "pkg-config": "/usr/bin/pkg-config",
}


@pytest.fixture(scope="session")
def cpp_client(require_command: Callable[[str], str]) -> Path:
    """The C++ client, built once into the cache."""
    make = require_command("make")
    require_command("g++")
    missing = [name for name, file in CPP_PACKAGES.items() if not Path(file).exists()]
    if missing:
        assert "CI" not in os.environ, f"CI installs {missing}: see .ci/run"
        pytest.skip(f"{', '.join(missing)} are not installed on this machine")
    sources = sorted([*CPP_CLIENT.iterdir(), *(ROOT / "protos/pagewire/v1").glob("*.proto")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    folder = cache_dir() / f"cpp-client-{digest[:12]}"
    result = subprocess.run(
        [make, "-s", "-j2", "-C", str(CPP_CLIENT), f"BUILD={folder}"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return folder / "chat"


# Its compilation takes a minute and more.
@pytest.mark.slow
def test_a_cpp_client_streams_and_reads_errors(
    smollm2_server: RunningServer, cpp_client: Path
) -> None:
    target = f"localhost:{smollm2_server.grpc_port}"
    environment = {**os.environ, "no_proxy": "localhost,127.0.0.1,::1"}
    answer = subprocess.run(
        [cpp_client, target, QUESTION], capture_output=True, text=True, timeout=90, env=environment
    )
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout
    assert int(answer.stdout.split()[-2]) > 3
    refused = subprocess.run(
        [cpp_client, target, "a " * 3000],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("3: messages: ")
