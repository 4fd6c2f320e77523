"""A collector of OpenTelemetry's protocol, over gRPC on a free port, that keeps the spans it is
sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Told:
    """A span as it came, ids in hex, times in seconds."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    seconds: float
    attributes: dict[str, Any]
    failed: bool


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Started and stopped as a context."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self._spans: list[Told] = []
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def Export(self, request: Any, context: Any) -> Any:
        with self._news:
            self.raw.append(request.SerializeToString())
            self._spans += spans_of(request)
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, trace: str, enough: Callable[[list[Told]], bool]) -> list[Told]:
        """A trace's spans, once there are enough."""
        spans: list[Told] = []

        def have_come() -> bool:
            spans[:] = self.of(trace)
            return enough(spans)

        with self._news:
            assert self._news.wait_for(have_come, 60), [(one.service, one.name) for one in spans]
        return spans

    def of(self, trace: str) -> list[Told]:
        """What has come of a trace."""
        return [span for span in self._spans if span.trace == trace]

    def __enter__(self) -> OtlpCollector:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()


def spans_of(request: Any) -> list[Told]:
    """The spans of an ExportTraceServiceRequest."""
    return [
        Told(
            service=_attributes(of_process.resource.attributes)["service.name"],
            name=span.name,
            trace=span.trace_id.hex(),
            span=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            attributes=_attributes(span.attributes),
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for of_process in request.resource_spans
        for scope in of_process.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
