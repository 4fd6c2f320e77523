"""`pagewire-frontend` as a process, in front of an engine that speaks both real wires."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire_frontend.frontend_cli import main
from tests.e2e.wire_peer import WirePeer, wait_until
from tests.fakes.fake_engine import VOCAB_SIZE, FakeEngine, fake_config
from tests.fakes.fake_engine_client import byte_tokenizer, tokenizer_files

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"pagewire-frontend is ready: HTTP (http://\S+), gRPC (\S+)")

# Runs the command, and at its end tells which of the heavy packages were imported.
WITH_IMPORTS_TOLD = """
import atexit, sys
heavy = ("torch", "transformers", "gradio", "numpy", "pagewire_engine", "pagewire_kernels")
atexit.register(lambda: print("imported:", [name for name in heavy if name in sys.modules]))
from pagewire_frontend.frontend_cli import main
main()
"""


def fake_engine(**knobs: Any) -> FakeEngine:
    # A text for each of the fake vocabulary's ids: 256 bytes, words, and three control tokens.
    tokenizer = byte_tokenizer(num_words=VOCAB_SIZE - 256 - 3)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return FakeEngine(tokenizer_files=tokenizer_files(tokenizer=tokenizer), **knobs)


@contextmanager
def frontend(
    *flags: str, env: dict[str, str] | None = None, script: str = WITH_IMPORTS_TOLD
) -> Iterator[subprocess.Popen[str]]:
    """The command on free ports; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script, "--http-port=0", "--grpc-port=0", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def addresses(process: subprocess.Popen[str]) -> tuple[str, str]:
    """(HTTP URL, gRPC target) of its ready line."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.match(line):
            return found[1], found[2]
    raise AssertionError(process.stderr.read() if process.stderr else "")


def test_it_serves_without_torch_and_stops_cleanly_on_sigterm() -> None:
    with fake_engine() as engine, frontend(f"--engine={engine.target}") as process:
        url, target = addresses(process)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=chat, trust_env=False, timeout=60
        ).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["message"]["content"]
        with grpc.insecure_channel(target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(text="hi", sampling_params={"max_tokens": 4})
            parts = list(stub.Generate(request))
            assert sum(len(part.outputs[0].token_ids) for part in parts) == 4
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "imported: []" in output
        assert "Traceback" not in errors


def test_it_says_what_it_waits_for_and_stops_on_sigint_while_waiting() -> None:
    with frontend("--engine=127.0.0.1:9", env={"PAGEWIRE_LOG_LEVEL": "error"}) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "waiting for the engine at 127.0.0.1:9" in line
        url = re.findall(r"http://\S+:\d+", line)[0]
        assert httpx.get(f"{url}/health/live", trust_env=False, timeout=60).status_code == 200
        assert httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 503
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_work_in_threads_that_nobody_waits_for_does_not_hold_up_its_end() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    patient = "from pagewire_frontend import template_budget as b\n"
    patient += "b.MAX_SECONDS, b.MAX_STEPS = 600.0, 10**12\n"
    flags = ("--allow-request-chat-template", "--grace-period-s=0.2")
    with (
        fake_engine() as engine,
        frontend(
            f"--engine={engine.target}", *flags, script=patient + WITH_IMPORTS_TOLD
        ) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        url, _ = addresses(process)
        chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template": endless}
        answer = pool.submit(
            httpx.post, f"{url}/v1/chat/completions", json=chat, trust_env=False, timeout=120
        )
        cpu_s = psutil.Process(process.pid).cpu_times
        started_s = cpu_s().user
        wait_until(lambda: cpu_s().user > started_s + 0.5, "the template is rendered", 60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        with suppress(httpx.HTTPError):
            assert answer.result().status_code == 503


def test_running_streams_get_the_grace_period_and_a_second_signal_ends_it() -> None:
    config = fake_config()
    with (
        fake_engine(config=config, step_time_s=0.05) as engine,
        frontend(f"--engine={engine.target}", "--grace-period-s=60") as process,
    ):
        url, _ = addresses(process)
        body = {"prompt": "hi", "max_tokens": 2000, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            for _ in range(20):  # it goes on
                next(lines)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        assert process.returncode != 0


def test_what_outlives_the_grace_period_is_told_and_the_log_has_no_traceback() -> None:
    with (
        fake_engine(config=fake_config(), step_time_s=0.05) as engine,
        frontend(f"--engine={engine.target}", "--grace-period-s=0.5") as process,
    ):
        url, target = addresses(process)
        body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
        with ThreadPoolExecutor() as pool, grpc.insecure_channel(target) as channel:
            asking = pool.submit(
                httpx.post, f"{url}/v1/completions", json=body, trust_env=False, timeout=60
            )
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(
                    text="hi", sampling_params={"max_tokens": 2000, "ignore_eos": True}
                )
            )
            next(call)
            with WirePeer(engine.target) as peer:
                wait_until(lambda: peer.stats().num_running == 2, "both run")
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            response = asking.result()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in caught.value.details()
    assert "Traceback" not in errors
    assert "2 requests that still ran" in errors


def start_in_this_process(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Exit status and standard error of a start that must fail."""
    with pytest.raises(SystemExit) as caught:
        main(["--http-port=0", "--grpc-port=0", *flags])
    status = caught.value.code
    assert isinstance(status, int)
    return status, capsys.readouterr().err


def test_a_template_that_does_not_parse_is_an_error_at_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_engine() as engine:
        flags = (f"--engine={engine.target}", "--chat-template={% for %}")
        status, errors = start_in_this_process(capsys, *flags)
    assert status == 2
    assert "pagewire-frontend: error: --chat-template: " in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine=nowhere"], "HOST:PORT"),
        (["--engin=127.0.0.1:1"], "--engine"),
        (["--max-request-bytes=1"], "--max-request-bytes"),
        (["--host=256.1.1.1"], "--host"),
        (["--host=192.0.2.1"], "--host"),
        (["--chat-template=no-such-file.jinja"], "no-such-file.jinja"),
        (["--api-key-file=/no/such/file"], "--api-key-file"),
        (["--tls-cert=/no/cert", "--tls-key=/no/key"], "--tls-cert"),
        (["--engine-key=/no/key"], "--engine-ca"),
        (["--local-socket=/no/such/folder/socket"], "--local-socket"),
        ([f"--local-socket=/tmp/{'a' * 200}"], "--local-socket"),
        (["--workers=2", "--host=192.0.2.1"], "--host"),
        (["--workers=2", "--response-store=1MiB"], "--workers"),
        (["--otlp-traces-endpoint=nowhere"], "--otlp-traces-endpoint"),
        (["--config=/no/such.yaml"], "--config"),
    ],
)
def test_bad_flags_are_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    status, errors = start_in_this_process(capsys, *flags)
    assert status == 2
    assert message in errors
    (line,) = (line for line in errors.splitlines() if "error" in line)
    assert line.startswith("pagewire-frontend: error: ")


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, errors = start_in_this_process(capsys, f"--http-port={port}")
    assert status == 1
    assert f"pagewire-frontend: error: --http-port: port {port} is in use; stop" in errors
