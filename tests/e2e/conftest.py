"""One `pagewire serve` with the small real model, shared by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serve_process import MODEL, Served, ServeProcess
from tests.fakes.ports import free_port


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Served]:
    # A setting from each source: the file, the environment and a flag.
    folder = tmp_path_factory.mktemp("serve")
    (folder / "settings.yaml").write_text(
        f"model: {smollm2_path}\nserved-model-name: from-yaml\nmax-model-len: 1024\n"
        "kv-cache-memory: 100000000\n"
    )
    flags = ["--config=settings.yaml", "--http-port=0", "--grpc-port=0", f"--ui-port={free_port()}"]
    with ServeProcess(flags, cwd=folder, env={"PAGEWIRE_SERVED_MODEL_NAME": MODEL}) as process:
        yield Served(process)
