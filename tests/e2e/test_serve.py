"""`pagewire serve` with a real model: ready, answering, over a killed engine, to a clean end."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest
from playwright.sync_api import expect

from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.serve_process import MODEL, Served, ServeProcess
from tests.e2e.wire_peer import wait_until
from tests.ui.browser import answer, launched_browser, send

ENGINE = "pagewire_engine.cli"
SERVICES = {ENGINE, "pagewire_frontend.frontend_cli", "pagewire_ui.cli"}


def test_all_that_the_ready_line_names_answers(served: Served) -> None:
    answer = served.chat("What is the capital of France?", temperature=0, max_tokens=16)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    with urllib.request.urlopen(served.page, timeout=20) as page:
        assert "pagewire chat" in page.read().decode()
    with grpc.insecure_channel(served.grpc) as channel:
        models = inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), timeout=20
        )
    # The environment wins over the file; what only the file says holds too.
    assert [(model.id, model.max_model_len) for model in models.models] == [(MODEL, 1024)]


def test_an_answer_tells_its_phases_and_metrics_the_engine_s_figures(served: Served) -> None:
    text = "What is the capital of France?"
    long, stopped = {"max_tokens": 40, "ignore_eos": True}, {"max_tokens": 64, "stop": ["Paris"]}
    for fields in (long, stopped):
        told = served.chat(text, temperature=0, **fields)
        metrics = told["metrics"]
        assert metrics["prefill_s"] > 0
        assert metrics["decode_s"] > 0
        assert metrics["steps"] >= told["usage"]["completion_tokens"]
        assert metrics["total_s"] >= metrics["time_to_first_token_s"] >= metrics["prefill_s"]
    assert told["choices"][0]["stop_reason"] == "Paris"
    with urllib.request.urlopen(served.http + "/metrics", timeout=20) as page:
        figures = dict(
            line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#"
        )

    def figure(name: str) -> float:
        return float(figures[f'pagewire_{name}{{model_name="{MODEL}"}}'])

    assert figure("iteration_tokens_total_count") > 4
    assert figure("prefix_cache_queries_total") >= figure("prefix_cache_hits_total") > 0
    assert figure("request_decode_time_seconds_sum") > 0
    # However few messages the tokens came in.
    assert figure("inter_token_latency_seconds_count") >= 1
    assert figure("num_requests_waiting") == 0


def test_the_page_chats_with_the_model(served: Served) -> None:
    with launched_browser() as browser:
        page = browser.new_page()
        page.goto(served.page)
        expect(page.locator("#head")).to_contain_text(MODEL, timeout=30_000)
        page.locator("#temperature input[type=number]").fill("0")
        page.locator("#max-tokens textarea").fill("24")
        send(page, "What is the capital of France?")
        expect(answer(page)).to_contain_text("Paris", timeout=60_000)
        expect(page.locator("#status")).to_contain_text("tok/s", timeout=60_000)


def test_a_stream_goes_on_over_a_killed_engine(served: Served) -> None:
    question = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    undisturbed = served.chat("Tell me a story about a lighthouse.", **question)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
        "stream": True,
        **question,
    }
    pieces: list[str] = []
    killed: psutil.Process | None = None
    with served.post("/v1/chat/completions", body) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            pieces += [choice["delta"].get("content") or "" for choice in choices]
            if killed is None and len("".join(pieces)) > 40:
                killed = served.process.children()[ENGINE]
                killed.kill()
    assert killed is not None
    assert "".join(pieces) == undisturbed["choices"][0]["message"]["content"]
    served.process.wait_for(f"engine (pid {killed.pid}) was killed by SIGKILL; restart in")
    served.process.wait_for("engine is ready again after")
    assert served.process.children().keys() == SERVICES
    assert served.process.output.count("pagewire is ready") == 1


@pytest.mark.slow
def test_sigterm_ends_everything_with_status_0(
    tmp_path: Path, smollm2_path: Path, free_port: Callable[[], int]
) -> None:
    ports = [f"--http-port={free_port()}", f"--grpc-port={free_port()}", "--ui-port=0"]
    with ServeProcess([str(smollm2_path), *ports], cwd=tmp_path) as process:
        line = process.wait_for("pagewire is ready")
        assert "chat page" not in line
        services = process.children()
        assert services.keys() == SERVICES - {"pagewire_ui.cli"}
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not any(_is_alive(service) for service in services.values())
        assert "Traceback" not in process.output


def test_a_killed_supervisor_leaves_no_orphans(
    tmp_path: Path, smollm2_path: Path, free_port: Callable[[], int]
) -> None:
    ports = [f"--http-port={free_port()}", f"--grpc-port={free_port()}", "--ui-port=0"]
    with ServeProcess([str(smollm2_path), *ports], cwd=tmp_path) as process:
        wait_until(lambda: bool(process.children()), "its services start", timeout_s=60)
        services = list(process.children().values())
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(_is_alive, services)), "its services end")


def test_an_unknown_model_ends_with_the_engines_own_error(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path / "no-such-model"), "--http-port=0", "--grpc-port=0"]
    with ServeProcess([*flags, "--ui-port=0"], cwd=tmp_path) as process:
        assert process.wait() in (1, 2)
        assert "pagewire serve: error: engine ended with" in process.output
        # The engine's own words, once.
        words = [line for line in process.output.splitlines() if "error" in line]
        assert [line.startswith("engine ") for line in words] == [True, False]
        assert "no-such-model" in words[0]
        assert "restart in" not in process.output


@pytest.mark.parametrize("setting", ["http-port", "grpc-port", "ui-port"])
def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path, setting: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = {"http-port": 0, "grpc-port": 0, "ui-port": 0, setting: port}
        with ServeProcess(
            [f"--{name}={value}" for name, value in flags.items()], cwd=tmp_path
        ) as it:
            assert it.wait() == 1
        assert f"pagewire serve: error: --{setting}: port {port} is in use" in it.output
        assert " | " not in it.output


def test_a_mistaken_flag_is_told_before_anything_starts(tmp_path: Path) -> None:
    with ServeProcess(["--max-model-length=5"], cwd=tmp_path) as process:
        assert process.wait() == 2
    assert "there is no flag --max-model-length; did you mean --max-model-len?" in process.output


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False  # gone between the two
