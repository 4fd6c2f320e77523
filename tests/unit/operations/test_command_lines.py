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
    capsys: pytest.CaptureFixture[str],
    program: Callable[[Sequence[str]], object],
    *argv: str,
    status: int = 2,
) -> str:
    with pytest.raises(SystemExit) as stopped:
        program(argv)
    assert stopped.value.code == status
    return capsys.readouterr().err.splitlines()[0]


def test_a_page_on_a_port_in_use_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = error_of(capsys, pagewire_ui, f"--port={port}", status=1)
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


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        (["--max-model-len=long"], {}, "--max-model-len: "),
        (["--no-such-flag"], {}, "there is no flag --no-such-flag"),
        (["a", "b"], {}, "'b' belongs to no flag"),
        (["a", "--model=b"], {}, "MODEL and --model are the same"),
        (["--config=/no/such.yaml"], {}, "--config: can't read /no/such.yaml"),
        ([], {"PAGEWIRE_CONFIG": "/no/such.yaml"}, "can't read /no/such.yaml"),
        ([], {"PAGEWIRE_HTTP_PORT": "eighty"}, "PAGEWIRE_HTTP_PORT: "),
        ([], {"PAGEWIRE_API_KEY": ""}, "PAGEWIRE_API_KEY: is set, but empty"),
        (["--host=192.0.2.1"], {}, "--host: 192.0.2.1 is no address of this machine"),
        (["--host=no-such-host.invalid"], {}, "--host: no-such-host.invalid is no address"),
        (["--http-port=7001", "--grpc-port=7001"], {}, "are both 7001"),
        (["--tls-cert=/no/cert"], {}, "TLS needs both --tls-cert and --tls-key"),
        (["--tls-cert=/no/cert", "--tls-key=/no/key"], {}, "--tls-cert: can't read /no/cert"),
        (["--api-key-file=/no/keys"], {}, "--api-key-file: can't read /no/keys"),
        (["--api-key=\u00e9"], {}, "ASCII"),
        (["--ui-auth=nobody"], {}, "--ui-auth: must be USER:PASSWORD"),
        (["--workers=2", "--response-store=1MiB"], {}, "--response-store needs --workers 1"),
        (["--otlp-traces-endpoint=nowhere"], {}, "--otlp-traces-endpoint: must be a URL"),
        (["--tool-call-parser=harmony"], {}, "--tool-call-parser: "),
        (["--lora-modules=nothing"], {}, "--lora-modules: "),
    ],
)
def test_a_mistake_in_the_settings_of_serve_is_a_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environ: dict[str, str],
    told: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        pagewire(["serve", *([] if "a" in flags else ["--model=m"]), *flags])
    assert stopped.value.code == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("pagewire serve: error: ")
    assert told in first
    assert hint == "Try `pagewire serve --help`."


def test_what_serve_lacks_on_this_machine_is_no_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("serve", "--model=m", f"--http-port={port}")
        assert f"port {port} is in use" in error_of(capsys, pagewire, *flags, status=1)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name)
    )
    error = error_of(capsys, pagewire, "serve", "--model=m", status=1)
    assert "the chat page needs gradio" in error
