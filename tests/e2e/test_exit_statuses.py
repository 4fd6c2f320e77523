"""`pagewire serve` ends with 2 where a part of it finds a setting at fault, and with one clear line
about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_models import write_tiny_model, write_tiny_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, "llama-llama3-rope-tied")
    write_tiny_tokenizer(folder)
    return folder


def serve(model: Path | str, *flags: str) -> subprocess.CompletedProcess[str]:
    ports = ("--http-port=0", "--grpc-port=0", "--ui-port=0", "--kv-cache-memory=4000000")
    return subprocess.run(
        [sys.executable, "-P", "-m", "pagewire", "serve", str(model), *ports, *flags],
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(
            ["--max-model-len=99999999"],
            "engine-service: error: --max-model-len: ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--tokenizer=/no/such/tokenizer"],
            "engine-service: error: --",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--lora-modules=one=/no/such", "--enable-lora"],
            "engine-service: error: --lora-modules",
            marks=pytest.mark.slow,
        ),
        (["--chat-template={% for %}"], "pagewire-frontend: error: --chat-template: "),
    ],
)
def test_a_setting_that_a_part_finds_at_fault_ends_serve_with_2(
    tiny: Path, flags: list[str], told: str
) -> None:
    done = serve(tiny, *flags)
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if " | " in line and "error:" in line)
    assert told in line
    assert "Traceback" not in done.stderr + done.stdout


def test_a_model_that_is_not_there_ends_serve_with_2() -> None:
    done = serve("/no/such/model")
    assert done.returncode == 2
    assert "engine-service: error: --model: there is no file or folder" in done.stderr
