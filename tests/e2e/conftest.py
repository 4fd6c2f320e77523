"""One `pagewire serve` with the small real model, shared by the end-to-end tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serve_process import MODEL, Served, ServeProcess


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Served]:
    # A setting from each source: the file, the environment and a flag.
    folder = tmp_path_factory.mktemp("serve")
    (folder / "settings.yaml").write_text(
        f"model: {smollm2_path}\nserved-model-name: from-yaml\nmax-model-len: 1024\n"
        "kv-cache-memory: 100000000\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ui_port = probe.getsockname()[1]
    flags = ["--config=settings.yaml", "--http-port=0", "--grpc-port=0", f"--ui-port={ui_port}"]
    with ServeProcess(flags, cwd=folder, env={"PAGEWIRE_SERVED_MODEL_NAME": MODEL}) as process:
        yield Served(process)
