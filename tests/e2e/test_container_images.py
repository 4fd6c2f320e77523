"""The images build, their processes start with no more rights than a cluster gives them, answer one
another, and pass their own health checks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.container_images import DOCKERFILE, Image, ImageStore
from tests.fakes.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


class Running:
    """A process of an image, and what it prints."""

    def __init__(self, image: Image, process: subprocess.Popen[str]) -> None:
        self.image = image
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, text: str, timeout_s: float = 300) -> str:
        """The line with `text`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := [line for line in self._lines if text in line]:
                return found[0]
            time.sleep(0.2)
        raise AssertionError(f"{text!r} was not printed, but:\n{''.join(self._lines)}")

    def health(self, *, ports: dict[str, int]) -> int:
        """The exit status of the image's health check, asked at other ports than the usual."""
        command = [
            re.sub(r":(\d+)", lambda found: f":{ports.get(found[1], found[1])}", word)
            for word in self.image.health_check
        ]
        check = self.image.start(command)
        output, _ = check.communicate(timeout=120)
        print(output)
        return check.returncode

    def status(self) -> dict[str, str]:
        """What the kernel says of its rights."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


@contextmanager
def running(image: Image, flags: Sequence[str], **mounts: str) -> Iterator[Running]:
    process = image.start([*image.entrypoint, *flags], {Path(k): v for k, v in mounts.items()})
    try:
        yield Running(image, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    if os.geteuid() != 0:
        message = "images are built and entered by root here"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    store = ImageStore(tmp_path_factory.mktemp("images"))
    try:
        (base,) = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
        store.make_base(base)
        yield store
    finally:
        store.remove()


def assert_has_no_rights(process: Running) -> None:
    told = process.status()
    assert told["Uid"].split() == ["10001"] * 4
    assert {told[f"Cap{kind}"] for kind in ("Prm", "Eff", "Bnd")} == {"0" * 16}
    assert told["NoNewPrivs"] == "1"


def test_engine_frontend_and_page_serve_from_their_images(
    store: ImageStore, smollm2_path: Path
) -> None:
    images = store.build_all({"engine-cpu": {"KERNELS": ""}, "frontend": {}, "ui": {}})
    engine_image, frontend_image, ui_image = images.values()
    control, deltas, http, grpc, page = (free_port() for _ in range(5))
    engine_flags = [f"--port={control}", f"--stream-endpoint=tcp://127.0.0.1:{deltas}"]
    engine_flags += [f"--model=/models/{smollm2_path.name}", "--kv-cache-memory=50000000"]
    frontend_flags = [f"--http-port={http}", f"--grpc-port={grpc}", f"--engine=127.0.0.1:{control}"]
    ui_flags = [f"--port={page}", f"--frontend=127.0.0.1:{grpc}"]
    with running(frontend_image, frontend_flags) as frontend:
        # Alive, and healthy, with no engine there yet.
        wait_for_health(frontend, {"8000": http})
        health = f"http://127.0.0.1:{http}/health"
        assert httpx.get(health, trust_env=False, timeout=60).status_code == 503
        models = {str(smollm2_path.parent): "models"}
        with running(engine_image, [*engine_flags, "--max-model-len=256"], **models) as engine:
            # By the kernels that the image brings: it has no compiler.
            engine.wait_for("cpu attention")
            engine.wait_for("engine-service is ready")
            assert not (engine_image.root / "usr/bin/g++").exists()
            assert engine.health(ports={"50061": control}) == 0
            assert_has_no_rights(engine)
            assert_has_no_rights(frontend)
            frontend.wait_for("pagewire-frontend is ready")
            answer = httpx.post(
                f"http://127.0.0.1:{http}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
                trust_env=False,
                timeout=120,
            )
            assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
            with running(ui_image, ui_flags) as ui:
                wait_for_health(ui, {"7860": page})
                assert_has_no_rights(ui)
        # The engine is gone: it is not ready, and is not to be killed for it.
        assert engine.health(ports={"50061": control}) == 1
        assert frontend.health(ports={"8000": http}) == 0
    for name, image in images.items():
        print(f"{name}: {image.size / 1e6:.0f} MB of files")
    # No torch where none is needed.
    for image in (frontend_image, ui_image):
        assert not list(image.root.glob("opt/pagewire/lib/python3*/site-packages/torch"))


def wait_for_health(process: Running, ports: dict[str, int]) -> None:
    """Until its health check passes."""
    deadline = time.monotonic() + 300
    while process.health(ports=ports) != 0:
        assert time.monotonic() < deadline
        assert process.process.poll() is None
        time.sleep(1)
