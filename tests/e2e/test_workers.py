"""`pagewire-frontend --workers 2`: two processes on the same ports, in front of one engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from pagewire.v1 import engine_pb2, engine_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.worker_metrics import merged
from tests.e2e.test_frontend_process import ROOT, fake_engine
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.frontend import chat_request

READY = re.compile(r"pagewire-frontend is ready: HTTP (http://\S+), gRPC (\S+), 2 workers")
NUM_REQUESTS = 40


@dataclass
class Workers:
    """The parent process, where its children answer, and their engine."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    engine: FakeEngine

    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def figures(self, name: str) -> dict[str, float]:
        """A figure's values by worker."""
        text = httpx.get(f"{self.http}/metrics", timeout=30).text
        return {
            sample.labels["worker"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with fake_engine() as engine:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagewire_frontend.frontend_cli", "--workers=2",
             "--http-port=0", "--grpc-port=0", f"--engine={engine.target}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            found = next(filter(None, map(READY.match, process.stdout)))
            yield Workers(process, found[1], found[2], engine)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()


def complete(workers: Workers) -> Any:
    """On a connection of its own."""
    answer = httpx.post(
        f"{workers.http}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def list_models(workers: Workers) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(workers.grpc, options=options) as channel:
        inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), timeout=60
        )


def test_both_serve_and_either_tells_the_figures_of_both(workers: Workers) -> None:
    assert len(workers.pids()) == 2
    for _ in range(NUM_REQUESTS):
        complete(workers)
    tokens = workers.figures("pagewire_generation_tokens_total")
    assert tokens.keys() == {"0", "1"}
    assert sum(tokens.values()) == 2 * NUM_REQUESTS
    assert all(tokens.values()), "connections went to one of them alone"
    assert workers.figures("pagewire_engine_ready") == {"0": 1.0, "1": 1.0}
    assert len(workers.figures("process_resident_memory_bytes")) == 2
    text = httpx.get(f"{workers.http}/metrics", timeout=30).text
    # One engine's figures are there once, and so is each family's head.
    assert len(re.findall(r"^pagewire_engine_steps_total\{", text, re.M)) == 1
    assert len(re.findall(r"^# TYPE pagewire_generation_tokens_total ", text, re.M)) == 1


def test_each_has_a_session_of_its_own_at_the_engine(workers: Workers) -> None:
    with grpc.insecure_channel(workers.engine.target) as channel:
        engine = engine_pb2_grpc.EngineStub(channel)
        # One of a worker that another test has killed goes once it times out.
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            stats = engine.GetStats(engine_pb2.GetStatsRequest())
            num_sessions = next(iter(stats)).num_sessions
            stats.cancel()
            if num_sessions == 2:
                break
            time.sleep(0.5)
        assert num_sessions == 2


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again_and_the_other_goes_on(workers: Workers) -> None:
    before = workers.pids()
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while not (len(pids := workers.pids()) == 2 and victim not in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(pids & before) == 1
    # It takes connections before it has reached the engine.
    while list(workers.figures("pagewire_engine_ready").values()) != [1.0, 1.0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(10):
        complete(workers)
        list_models(workers)


def test_grpc_is_served_there_too(workers: Workers) -> None:
    with grpc.insecure_channel(workers.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = chat_request(sampling_params={"max_tokens": 3})
        assert stub.ChatUnary(request, timeout=60).usage.completion_tokens == 3


def test_a_port_of_another_server_is_not_shared(workers: Workers) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        result = subprocess.run(
            [sys.executable, "-P", "-m", "pagewire_frontend.frontend_cli", "--workers=2",
             f"--http-port={other.getsockname()[1]}", "--grpc-port=0"],
            capture_output=True,
            text=True,
            timeout=120,
        )  # fmt: skip
    assert result.returncode == 1
    assert "--http-port" in result.stderr
    assert "in use" in result.stderr


def test_what_one_worker_keeps_the_others_lack() -> None:
    with pytest.raises(ValidationError, match="--response-store needs --workers 1"):
        FrontendConfig(workers=2, response_store=1000)


def test_merged_metrics_keep_every_sample() -> None:
    one = b'# HELP a_total A.\n# TYPE a_total counter\na_total{worker="0"} 1.0\n'
    two = b'# HELP a_total A.\n# TYPE a_total counter\na_total{worker="1"} 2.0\n'
    text = merged([one, two]).decode()
    assert text.count("# TYPE") == 1
    assert 'a_total{worker="0"} 1.0' in text
    assert 'a_total{worker="1"} 2.0' in text
