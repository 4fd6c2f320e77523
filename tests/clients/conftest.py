"""Real models behind both real commands, for all client tests."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagewire_frontend.model_download import cache_dir

ROOT = Path(__file__).resolve().parents[2]
NODE_CLIENT = Path(__file__).resolve().parent / "node"
START_TIMEOUT_S = 120.0
_READY = re.compile(
    r"pagewire-frontend is ready: HTTP http://localhost:(\d+), gRPC localhost:(\d+)"
)


@dataclass(frozen=True)
class RunningServer:
    """Ports of a frontend."""

    http_port: int
    grpc_port: int

    @property
    def base_url(self) -> str:
        """What OpenAI's clients are given."""
        return f"http://localhost:{self.http_port}/v1"


@pytest.fixture(scope="session")
def smollm2_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """SmolLM2, or the model whose path PAGEWIRE_TEST_MODEL names."""
    with _serving(
        os.environ.get("PAGEWIRE_TEST_MODEL") or str(smollm2_path),
        "smollm2",
        tmp_path_factory.mktemp("smollm2_server"),
        "--max-model-len=1024",
        f"--kv-cache-memory={128 << 20}",
    ) as server:
        yield server


@pytest.fixture(scope="session")
def minilm_server(
    minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The embedding model."""
    logs = tmp_path_factory.mktemp("minilm_server")
    with _serving(str(minilm_folder), "minilm", logs, "--num-threads=1") as server:
        yield server


@contextmanager
def _serving(model: str, name: str, logs: Path, *engine_flags: str) -> Iterator[RunningServer]:
    """`engine-service` and `pagewire-frontend` on free ports."""
    commands: list[_Command] = []
    try:
        engine = _Command(
            logs / "engine.log",
            "pagewire_engine.cli",
            f"--model={model}",
            f"--served-model-name={name}",
            "--port=0",
            *engine_flags,
        )
        commands.append(engine)
        target = engine.wait_for(re.compile(r"engine-service is ready: .* on (127\.0\.0\.1:\d+)"))
        frontend = _Command(
            logs / "frontend.log",
            "pagewire_frontend.frontend_cli",
            f"--engine={target[1]}",
            "--http-port=0",
            "--grpc-port=0",
            "--response-store=1MiB",
        )
        commands.append(frontend)
        ready = frontend.wait_for(_READY)
        yield RunningServer(int(ready[1]), int(ready[2]))
    finally:
        for command in reversed(commands):
            command.stop()


class _Command:
    """A command whose output, line by line, goes to a file and can be waited for."""

    def __init__(self, log: Path, module: str, *flags: str) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The first line that begins with the pattern."""
        found: list[re.Match[str]] = []

        def seen() -> bool:
            found.extend(match for line in self._lines if (match := pattern.match(line)))
            return bool(found) or self._ended

        with self._changed:
            self._changed.wait_for(seen, START_TIMEOUT_S)
        assert found, f"{pattern.pattern!r} was not printed:\n{''.join(self._lines)}"
        return found[0]

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not do it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@pytest.fixture(scope="session")
def require_command() -> Callable[[str], str]:
    """A function that gives a command's path, or skips the test that needs it."""
    import shutil

    def require(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is not installed on this machine")
        return path

    return require


@pytest.fixture(scope="session")
def node_modules(require_command: Callable[[str], str]) -> Path:
    """The Node client's packages, installed once into the cache."""
    require_command("node")
    npm = require_command("npm")
    package = (NODE_CLIENT / "package.json").read_bytes()
    folder = cache_dir() / f"node-client-{hashlib.sha256(package).hexdigest()[:12]}"
    installed = folder / "installed"
    if not installed.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(package)
        flags = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        result = subprocess.run(
            [npm, "install", *flags], cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stderr
        installed.touch()
    return folder / "node_modules"
