"""Spans of requests that end in every way, and what traces need to be there at all."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from pagewire.errors import InternalError, InvalidArgumentError
from pagewire.pooling import PoolingInfo, Task
from pagewire.service_name import Program
from pagewire.settings import SettingsError
from pagewire.tracing import Tracing, check_installed
from pagewire.v1 import inference_pb2
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, grpc_stub, http_client, make_serving
from tests.fakes.otlp_collector import spans_of

TRACEPARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "xylophone"}]}


class Spans:
    """What was told, in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    def by_name(self) -> dict[str, ReadableSpan]:
        """The spans that have ended, each once."""
        ended = self._exporter.get_finished_spans()
        assert len({span.name for span in ended}) == len(ended), [span.name for span in ended]
        assert "xylophone" not in "".join(span.to_json() for span in ended)
        return {span.name: span for span in ended}


async def asked(client: FakeEngineClient, path: str, body: Any, **config: Any) -> tuple[int, Spans]:
    spans = Spans()
    serving = await make_serving(client, **config)
    serving.tracing = spans.tracing
    async with http_client(serving) as http:
        status = (await http.post(path, json=body, headers=TRACEPARENT)).status_code
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code in (200, 401)
    return status, spans


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def own(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_the_engine_is_told_to_go_on_below_the_generation() -> None:
    client = FakeEngineClient()
    _, spans = await asked(client, "/v1/chat/completions", CHAT)
    told = spans.by_name()
    assert set(told) == {"POST /v1/chat/completions", "render_chat", "generate", "tokenize"}
    assert parent(told["POST /v1/chat/completions"]) == int("b" * 16, 16)
    header = dict(client.requests[0].trace_headers)["traceparent"]
    assert header == f"00-{'a' * 32}-{own(told['generate']):016x}-01"
    assert attributes(told["generate"])["gen_ai.response.finish_reasons"] == ("stop",)


async def test_each_prompt_of_a_request_has_its_own_generation() -> None:
    client = FakeEngineClient()
    spans = Spans()
    serving = await make_serving(client)
    serving.tracing = spans.tracing
    async with http_client(serving) as http:
        await http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}, headers=TRACEPARENT)
    parents = {dict(request.trace_headers)["traceparent"] for request in client.requests}
    assert len(parents) == 3


async def test_a_client_without_a_trace_begins_one() -> None:
    client = FakeEngineClient()
    spans = Spans()
    serving = await make_serving(client)
    serving.tracing = spans.tracing
    async with http_client(serving) as http:
        for headers in ({}, {"traceparent": "00-nonsense"}):
            await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    traces = {dict(request.trace_headers)["traceparent"][3:35] for request in client.requests}
    assert len(traces) == 2


async def test_texts_that_are_pooled_are_one_part() -> None:
    client = FakeEngineClient(tasks=(Task.EMBED,), pooling=PoolingInfo(8))
    _, spans = await asked(client, "/v1/embeddings", {"input": ["a", "b"]})
    told = spans.by_name()
    assert set(told) == {"POST /v1/embeddings", "pool", "tokenize"}
    for request in client.requests:
        assert f"{own(told['pool']):016x}" in dict(request.trace_headers)["traceparent"]


@pytest.mark.parametrize(
    ("client", "body", "status", "failed"),
    [
        (FakeEngineClient(), CHAT | {"temperature": -1}, 400, set()),
        (FakeEngineClient(chat_template="{{ 1 / 0 }}"), CHAT, 400, {"render_chat"}),
        (FakeEngineClient(fail_after=0), CHAT, 503, {"generate", "POST /v1/chat/completions"}),
        (
            FakeEngineClient(fail_after=3, failure=InternalError("xylophone")),
            CHAT | {"stream": True},
            200,
            {"generate"},
        ),
        (
            FakeEngineClient(fail_after=0, failure=InvalidArgumentError("prompt", "xylophone")),
            CHAT,
            400,
            {"generate"},
        ),
    ],
    ids=["refused", "template", "engine", "mid-stream", "by the engine"],
)
async def test_a_failure_is_told_where_it_was_and_never_in_its_own_words(
    client: FakeEngineClient, body: Any, status: int, failed: set[str]
) -> None:
    answered, spans = await asked(client, "/v1/chat/completions", body)
    told = spans.by_name()
    assert answered == status
    request = attributes(told["POST /v1/chat/completions"])
    assert request["http.response.status_code"] == status
    assert {name for name, span in told.items() if not span.status.is_ok and (
        span.status.description is not None)} == failed  # fmt: skip


async def test_who_has_no_key_leaves_no_trace() -> None:
    status, spans = await asked(FakeEngineClient(), "/v1/completions", {"prompt": "a"}, api_key="k")
    assert status == 401
    assert not spans.by_name()


async def test_what_is_not_served_has_no_name_of_the_clients() -> None:
    status, spans = await asked(FakeEngineClient(), "/xylophone", {})
    assert status == 404
    assert set(spans.by_name()) == {"POST"}


async def test_calls_over_grpc_end_with_their_status() -> None:
    spans = Spans()
    client = FakeEngineClient(hang_after=1)
    server = FrontendServer(FrontendConfig(http_port=0, grpc_port=0, grace_period_s=0.0), client)
    server._serving.tracing = spans.tracing
    await server.start()
    try:
        async with grpc_stub(server) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Embed(inference_pb2.EmbedRequest(texts=["a"]))
            call = stub.Chat(chat_request("xylophone"), metadata=tuple(TRACEPARENT.items()))
            await call.read()
            call.cancel()
            async with asyncio.timeout(60):
                while "pagewire.v1.Inference/Chat" not in spans.by_name():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    finally:
        await server.stop()
    told = spans.by_name()
    embed, chat = told["pagewire.v1.Inference/Embed"], told["pagewire.v1.Inference/Chat"]
    assert attributes(embed)["rpc.grpc.status_code"] == 9
    assert attributes(embed)["error.type"] == "failed_precondition"
    assert parent(chat) == int("b" * 16, 16)
    assert attributes(chat)["error.type"] == "cancelled"
    assert attributes(told["generate"])["error.type"] == "cancelled"


@pytest.fixture
def http_collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector that speaks OTLP over HTTP, and what it was told."""
    told: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told.append((self.path, body, self.headers.get("content-encoding")))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", told
        server.shutdown()
        thread.join()


def test_spans_go_over_http_where_the_environment_says_so(
    http_collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, told = http_collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracing = Tracing.open(url, Program.FRONTEND)
    assert tracing is not None
    tracing.request_span("one", TRACEPARENT.items()).end()
    tracing.close(60)
    (path, body, encoding), = told  # fmt: skip
    assert (path, encoding) == ("/v1/traces", None)
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    assert [(span.service, span.name) for span in spans_of(request)] == [
        ("pagewire-frontend", "one")
    ]


def test_a_protocol_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(SettingsError, match="http/protobuf"):
        Tracing.open("http://127.0.0.1:1", "x")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="http://localhost:4317"):
        FrontendConfig(otlp_traces_endpoint=endpoint)


def test_where_opentelemetry_is_missing_the_error_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_installed(None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for make in (check_installed, lambda url: Tracing.open(url, "x")):
        with pytest.raises(SettingsError, match=r"pagewire\[otel\]"):
            make("http://127.0.0.1:1")
