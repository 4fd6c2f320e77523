"""Traces by OpenTelemetry, for operators who ask for them. Nothing of it is imported before.

What spans tell are names, numbers and kinds of errors: never a text of a prompt or an answer, nor
an error's message, which may quote one.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pagewire.service_name import Program, service_name
from pagewire.settings import SettingsError, UnmetSettingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from pagewire.outputs import RequestTimes

TraceHeaders = tuple[tuple[str, str], ...]
"""`traceparent`, and `tracestate` where there is one (W3C Trace Context), as a call's metadata."""
Attributes = Mapping[str, str | int | float | list[str]]

_HEADERS = ("traceparent", "tracestate")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# A collector that is away must not hold up the end of a process.
_CLOSE_S = 2.0
_PACKAGES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
_INSTALL = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'pagewire[otel]'"


class Tracing:
    """Makes spans, which threads of OpenTelemetry's send on. Where they can't, spans are dropped
    and nobody waits.

    Args:
        provider: takes the spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from pagewire import __version__

        self._provider = provider
        self._tracer = provider.get_tracer("pagewire", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def open(
        endpoint: str | None, program: Program, attributes: Attributes | None = None
    ) -> Tracing | None:
        """Traces to a collector, by OTLP over gRPC, or over HTTP where
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is `http/protobuf`. OpenTelemetry's other variables are
        heeded too.

        Args:
            endpoint: the collector's URL; None: there are no traces.
            program: what this process is, and is called unless the operator says otherwise.
            attributes: of this process.

        Raises:
            UnmetSettingError: OpenTelemetry is not installed.
            SettingsError: its variables ask for what there is not.
        """
        if endpoint is None:
            return None
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = _exporter(endpoint)
        except ImportError:
            raise UnmetSettingError(_INSTALL) from None
        from pagewire import __version__

        named = {"service.name": service_name(program), "service.version": __version__}
        resource = Resource.create({**named, **(attributes or {})})
        # Its own hook at the exit would wait for a collector that is away.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return Tracing(provider)

    def request_span(
        self,
        name: str,
        headers: Iterable[tuple[str, str | bytes]],
        attributes: Attributes | None = None,
    ) -> TraceSpan:
        """A span for what another process asks of this one, which goes on with its trace.

        Args:
            name: of the span.
            headers: that came with the request; only W3C's two are read.
            attributes: of the span.
        """
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(trace_headers(headers))
        span = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, attributes=dict(attributes or {})
        )
        return TraceSpan(self, span)

    def tell_times(
        self, headers: TraceHeaders, times: RequestTimes, end_ns: int, failure: str | None = None
    ) -> None:
        """What a request went through in the engine, as spans: queue, prefill and decode below one
        of the whole request.

        Args:
            headers: that came with the request.
            times: of the request that has ended.
            end_ns: when it ended, Unix time in nanoseconds.
            failure: what kind of error ended it, if one did.
        """
        from opentelemetry.trace import SpanKind

        phases = (
            ("queue", times.queue_s), ("prefill", times.prefill_s), ("decode", times.decode_s)
        )  # fmt: skip
        start_ns = end_ns - sum(int(seconds * 1e9) for _, seconds in phases)
        attributes: Attributes = {
            "pagewire.cached_tokens": times.cached_tokens,
            "pagewire.preemptions": times.preemptions,
            "pagewire.steps": times.steps,
            "pagewire.step_time_s": times.step_s,
        }
        parent = self._propagator.extract(dict(headers))
        span = self._tracer.start_span(
            "engine_request",
            parent,
            kind=SpanKind.SERVER,
            attributes=dict(attributes),
            start_time=start_ns,
        )
        request = TraceSpan(self, span)
        for name, seconds in phases:
            phase = request.child(name, start_ns=start_ns)
            start_ns += int(seconds * 1e9)
            phase.end(start_ns)
        if failure is not None:
            request.fail(failure)
        request.end(end_ns)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Sends what is left, as far as that takes no longer than `timeout_s`."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(timeout_s)


class TraceSpan:
    """A part of a trace that lasts until `end`."""

    __slots__ = ("_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def headers(self) -> TraceHeaders:
        """What tells another process to go on below this span."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._tracing._propagator.inject(carrier, set_span_in_context(self._span))
        return tuple(carrier.items())

    def child(
        self, name: str, attributes: Attributes | None = None, *, start_ns: int | None = None
    ) -> TraceSpan:
        """A part of this one.

        Args:
            name: of the span.
            attributes: of the span.
            start_ns: when it began, Unix time in nanoseconds; None: now.
        """
        from opentelemetry.trace import set_span_in_context

        span = self._tracing._tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=dict(attributes or {}),
            start_time=start_ns,
        )
        return TraceSpan(self._tracing, span)

    def rename(self, name: str) -> None:
        """Gives it the name that is known by now."""
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self._span.set_attributes(dict(attributes))

    def fail(self, kind: str) -> None:
        """It went wrong: `kind` says how, and quotes nobody."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, kind))

    def end(self, end_ns: int | None = None) -> None:
        """It is over: now, or at a Unix time in nanoseconds."""
        self._span.end(end_ns)


def check_installed(endpoint: str | None) -> None:
    """Finds out early whether there can be traces.

    Raises:
        UnmetSettingError: there is an endpoint, and OpenTelemetry is not installed.
    """
    if endpoint is not None and not all(map(importlib.util.find_spec, _PACKAGES)):
        raise UnmetSettingError(_INSTALL)


def trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Those of W3C's Trace Context among a request's headers or a call's metadata."""
    return {key: value for key, value in headers if key in _HEADERS and isinstance(value, str)}


def _exporter(endpoint: str) -> SpanExporter:
    protocol = next((os.environ[name] for name in _PROTOCOLS if name in os.environ), "grpc")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint=endpoint)
    if protocol != "grpc":
        raise SettingsError(f"{_PROTOCOLS[0]} must be grpc or http/protobuf, not {protocol!r}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    return GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
