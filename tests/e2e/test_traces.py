"""`--otlp-traces-endpoint`: one trace across client, frontend and engine, each another process."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2_grpc
from tests.fakes.fake_engine import ROOT, FakeEngineProcess
from tests.fakes.frontend import chat_request
from tests.fakes.otlp_collector import OtlpCollector, Told

READY = re.compile(r"pagewire-frontend is ready: HTTP (http://\S+), gRPC (\S+?)(, 2 workers)?$")
SECRET = "xylophone"
# A span waits no longer than this to be sent, in milliseconds.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
ENGINE_SPANS = {"engine_request", "queue", "prefill", "decode"}


@dataclass
class Traced:
    """Where the parts answer."""

    collector: OtlpCollector
    http: str
    grpc: str


@contextmanager
def frontend(*flags: str) -> Iterator[tuple[str, str]]:
    """`pagewire-frontend`, which must end well; its addresses."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire_frontend.frontend_cli",
         "--http-port=0", "--grpc-port=0", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | SOON,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = next(filter(None, (READY.match(line.strip()) for line in process.stdout)))
        yield found[1], found[2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with (
        pytest.MonkeyPatch.context() as environment,
        OtlpCollector() as collector,
    ):
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", SOON["OTEL_BSP_SCHEDULE_DELAY"])
        to_collector = f"--otlp-traces-endpoint={collector.url}"
        config = {"otlp_traces_endpoint": collector.url}
        with (
            FakeEngineProcess(config, tokenizer=True, step_time_s=0.002) as engine,
            frontend("--workers=2", f"--engine={engine.target}", to_collector) as (http, target),
        ):
            yield Traced(collector, http, target)


def chat(http: str, headers: dict[str, str], **fields: Any) -> Any:
    messages = [{"role": "user", "content": f"Tell of the {SECRET}."}]
    body = {"messages": messages, "max_tokens": 5, **fields}
    request = urllib.request.Request(
        f"{http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        return answer.read()


def client_span(sampled: str = "01") -> tuple[str, str, str]:
    """The ids of a client's trace and span, and the header that tells them."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{sampled}"


def is_whole(spans: list[Told]) -> bool:
    return {span.name for span in spans} >= ENGINE_SPANS | {"generate", "render_chat"} and any(
        span.parent == "" or "/" in span.name for span in spans
    )


def check_tree(spans: list[Told], client: str, name: str) -> dict[str, Told]:
    """Every span below the right one, once."""
    by_name = {span.name: span for span in spans}
    assert len(by_name) == len(spans)
    parents = {
        name: client,
        "render_chat": by_name[name].span,
        "generate": by_name[name].span,
        "tokenize": by_name["generate"].span,
        "engine_request": by_name["generate"].span,
        "queue": by_name["engine_request"].span,
        "prefill": by_name["engine_request"].span,
        "decode": by_name["engine_request"].span,
    }
    assert {span.name: span.parent for span in spans} == parents
    services = {span.name: span.service for span in spans}
    assert {each for each, of in services.items() if of == "pagewire-engine"} == ENGINE_SPANS
    assert {of for each, of in services.items() if each not in ENGINE_SPANS} == {
        "pagewire-frontend"
    }
    return by_name


def test_one_trace_over_http(traced: Traced) -> None:
    trace, span, header = client_span()
    answer = json.loads(chat(traced.http, {"traceparent": header, "x-request-id": "mine-1"}))
    spans = traced.collector.wait_for(trace, is_whole)
    told = check_tree(spans, span, "POST /v1/chat/completions")
    request = told["POST /v1/chat/completions"].attributes
    assert request["http.response.status_code"] == 200
    assert request["pagewire.request_id"] == "mine-1"
    generate = told["generate"].attributes
    assert generate["gen_ai.usage.output_tokens"] == 5
    assert generate["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert generate["gen_ai.request.max_tokens"] == 5
    for phase in ("queue", "prefill", "decode"):
        seconds = answer["metrics"][f"{phase}_s"]
        assert told[phase].seconds == pytest.approx(seconds, abs=1e-4)
    assert told["decode"].seconds > 0
    assert told["engine_request"].seconds <= told["generate"].seconds + 0.05


def test_one_trace_of_a_stream_over_http(traced: Traced) -> None:
    trace, span, header = client_span()
    chat(traced.http, {"traceparent": header}, stream=True)
    spans = traced.collector.wait_for(trace, is_whole)
    check_tree(spans, span, "POST /v1/chat/completions")


def test_one_trace_over_grpc(traced: Traced) -> None:
    trace, span, header = client_span()
    request = chat_request(f"Tell of the {SECRET}.", sampling_params={"max_tokens": 5})
    with grpc.insecure_channel(traced.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert list(stub.Chat(request, metadata=(("traceparent", header),), timeout=60))
    spans = traced.collector.wait_for(trace, is_whole)
    told = check_tree(spans, span, "pagewire.v1.Inference/Chat")
    assert told["pagewire.v1.Inference/Chat"].attributes["rpc.grpc.status_code"] == 0


def test_no_text_is_told(traced: Traced) -> None:
    trace, _, header = client_span()
    answer = json.loads(chat(traced.http, {"traceparent": header}))
    text = answer["choices"][0]["message"]["content"]
    traced.collector.wait_for(trace, is_whole)
    sent = b"".join(traced.collector.raw)
    assert SECRET.encode() not in sent
    assert len(text) > 2
    assert text.encode() not in sent


def test_a_trace_that_its_client_does_not_record_is_recorded_nowhere(traced: Traced) -> None:
    unrecorded, _, header = client_span("00")
    chat(traced.http, {"traceparent": header})
    # What came later has arrived, and with it what came before.
    trace, _, header = client_span()
    chat(traced.http, {"traceparent": header})
    traced.collector.wait_for(trace, is_whole)
    assert not traced.collector.of(unrecorded)


@pytest.mark.slow
def test_a_collector_that_is_away_holds_nobody_up() -> None:
    # Nobody listens at port 1; and the frontend ends as soon as ever: see `frontend`.
    config = {"otlp_traces_endpoint": "http://127.0.0.1:1"}
    with (
        FakeEngineProcess(config, tokenizer=True) as engine,
        frontend(f"--engine={engine.target}", "--otlp-traces-endpoint=http://127.0.0.1:1") as (
            http,
            _,
        ),
    ):
        for _ in range(20):
            chat(http, {})
