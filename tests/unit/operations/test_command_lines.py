"""What the programs say where a flag's value can't be used."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pagewire_engine.cli import main as engine_service
from pagewire_frontend.cli import main as pagewire
from pagewire_ui.cli import main as pagewire_ui


def error_of(
    capsys: pytest.CaptureFixture[str], program: Callable[[Sequence[str]], object], *argv: str
) -> str:
    with pytest.raises(SystemExit) as stopped:
        program(argv)
    assert stopped.value.code in (1, 2)
    return capsys.readouterr().err.splitlines()[0]


def test_a_page_on_a_port_in_use_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = error_of(capsys, pagewire_ui, f"--port={port}")
    assert error == (
        f"pagewire-ui: error: --port: port {port} is in use; stop the program that has it, or "
        "choose another port by --port"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_page_on_an_address_of_another_machine_is_refused(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    error = error_of(capsys, pagewire_ui, f"--host={host}")
    assert error.startswith(f"pagewire-ui: error: --host: {host} is no address of this machine")


def test_a_page_wants_host_and_port_of_the_frontend(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, pagewire_ui, "--frontend=nowhere")
    assert error.startswith("pagewire-ui: error: --frontend: must be HOST:PORT")


@pytest.mark.parametrize("program", [engine_service, lambda argv: pagewire(["serve", *argv])])
def test_an_empty_model_is_not_the_current_folder(
    capsys: pytest.CaptureFixture[str], program: Callable[[Sequence[str]], object]
) -> None:
    assert "--model: string should have at least 1 character" in error_of(
        capsys, program, "--model="
    )


def test_a_folder_that_proto_files_can_not_go_to_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    error = error_of(capsys, pagewire, "protos", f"--out={tmp_path / 'file'}")
    assert error == (
        f"pagewire protos: error: --out: can't write to {tmp_path / 'file'}: Not a directory"
    )


def test_an_engine_without_torch_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    assert engine_service(["m"]) == 1
    assert capsys.readouterr().err == (
        "engine-service: error: the engine needs torch: pip install 'pagewire[engine]'\n"
    )
