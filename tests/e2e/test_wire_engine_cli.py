"""`engine-service` on the command line, where it does not come to serving."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewire_engine.cli", *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys, pagewire_engine.cli as cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'transformers', 'grpc'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(["/no/such/model"], "/no/such/model", marks=pytest.mark.slow),
        (["anything", "--stream-endpoint", "carrier-pigeon"], "--stream-endpoint"),
        (["anything", "--host", "192.0.2.1"], "192.0.2.1"),
        (["anything", "--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (["anything", "--tls-key", "key.pem"], "--tls-cert"),
        (["anything", "--tls-cert", "/no/cert", "--tls-key", "/no/key"], "/no/cert"),
        pytest.param(
            ["anything", "--trust-remote-code"], "--trust-remote-code", marks=pytest.mark.slow
        ),
    ],
)
def test_what_keeps_it_from_starting_is_one_clear_line(flags: list[str], told: str) -> None:
    done = run(*flags, *([] if "--host" in flags else ["--port=0"]))
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("engine-service: error: ")


def test_a_taken_port_is_told_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("/no/such/model", f"--port={port}")
    assert done.returncode == 1
    assert f"{port}: the port is taken" in done.stderr
