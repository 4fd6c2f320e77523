"""What Prometheus is told, under the names operators know from vLLM with the prefix pagewire_."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewire.delta_frames import FrameCounts
from pagewire.errors import ErrorCode
from pagewire.histogram import Histogram, HistogramCounts
from pagewire.outputs import FinishReason, RequestTimes
from pagewire_frontend.engine_client.failover_counts import FailoverCounts
from pagewire_frontend.engine_figures import EngineFigures, RoutingFigures, histogram_family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, with some more at the fine end.
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class FrontendMetrics:
    """The counters of one frontend, and its engine's, in a registry of their own.

    Attributes:
        engine: figures of the engines.
        routing: what was sent to each engine.
        failover: what its losses have cost.
        frames: of the delta wire, counted by the engine client.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineFigures()
        self.failover = FailoverCounts()
        self.registry.register(_Losses(self.failover))
        self.frames = FrameCounts()
        self.registry.register(_FrameFigures(self.frames))
        self.routing = RoutingFigures()
        self._inter_token = _Counted(
            "pagewire_inter_token_latency_seconds",
            "Time between tokens of a sequence; tokens that come together share it.",
            _TPOT_BUCKETS,
        )
        self.registry.register(self._inter_token)
        ProcessCollector(registry=self.registry)
        self.registry.register(self.routing)
        self._in_flight = self._gauge(
            "num_requests_in_flight", "Requests accepted by this frontend and not yet ended."
        )
        self._engine_ready = self._gauge("engine_ready", "1 while the engine can serve requests.")
        self._success = self._counter(
            "request_success", "Sequences that ended, by reason.", ["finished_reason"]
        )
        self._failure = self._counter(
            "request_failure", "Requests refused or failed, by gRPC status code.", ["code"]
        )
        self._slow_clients = self._counter(
            "slow_clients_cut_off", "Streams ended because their client did not read.", ["api"]
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = self._counter("generation_tokens", "Produced tokens.")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens of ended requests that the prefix cache held."
        )
        self._first_token = _Counted(
            "pagewire_time_to_first_token_seconds",
            "From acceptance to the first token.",
            _TTFT_BUCKETS,
        )
        self.registry.register(self._first_token)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time a token after the first, of each ended request.",
            _TPOT_BUCKETS,
        )
        self._total = self._histogram(
            "e2e_request_latency_seconds", "From acceptance to the end.", _LATENCY_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "In the engine's waiting queue.", _LATENCY_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the queue to the first token.", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", _LATENCY_BUCKETS
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "Prefill and decode together.", _LATENCY_BUCKETS
        )
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of each ended request.", _LENGTH_BUCKETS
        )
        self._output_length = self._histogram(
            "request_generation_tokens", "Tokens of each sequence that ended.", _LENGTH_BUCKETS
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            self._success.labels(reason.name.lower())
        # From 0: Prometheus sees no increase in a series that begins with its first failure.
        for code in ErrorCode:
            self._failure.labels(code.name)

    def render(
        self, model_name: str, *, worker: int | None = None, with_engine: bool = True
    ) -> bytes:
        """The Prometheus text format.

        Args:
            model_name: the label `model_name` of every figure of ours.
            worker: the label `worker` of the figures of this process; None: it is alone.
            with_engine: the engine's figures too.
        """
        ours = {} if worker is None else {"worker": str(worker)}
        collected = list(_labelled(self.registry, model_name, ours))
        if with_engine:
            collected += _labelled(self.engine, model_name, {})
        return generate_latest(Collected(collected))

    def set_engine_ready(self, ready: bool) -> None:
        self._engine_ready.set(1 if ready else 0)

    def request_started(self) -> None:
        self._in_flight.inc()

    def request_ended(self) -> None:
        self._in_flight.dec()

    def request_failed(self, code: ErrorCode) -> None:
        self._failure.labels(code.name).inc()

    def slow_client_cut_off(self, api: str) -> None:
        """A client of `grpc` or `http` did not read."""
        self._slow_clients.labels(api).inc()

    def sequences_finished(self, reason: FinishReason, count: int) -> None:
        self._success.labels(reason.name.lower()).inc(count)

    def first_token(self) -> HistogramCounts:
        """Seconds from acceptance to the first token, of the requests that ran to their end."""
        return self._first_token.histogram.snapshot()

    def generated(self, num_tokens: int, waited_s: float | None) -> None:
        """Tokens of a sequence came, `waited_s` after the ones before; None: they are its first."""
        self._generation_tokens.inc(num_tokens)
        if waited_s is not None:
            self._inter_token.histogram.observe(waited_s / num_tokens, num_tokens)

    def prompt(self, num_tokens: int, cached: int) -> None:
        """The prompt of a request that ended, one way or another."""
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(cached)

    def finished(
        self,
        *,
        prompt_tokens: int,
        output_tokens: Sequence[int],
        first_token_s: float,
        total_s: float,
        times: RequestTimes,
    ) -> None:
        """Of a request that ran to its end.

        Args:
            prompt_tokens: length of its prompt.
            output_tokens: lengths of its sequences.
            first_token_s, total_s: since it was accepted here.
            times: its life in the engine.
        """
        self._prompt_length.observe(prompt_tokens)
        for length in output_tokens:
            self._output_length.observe(length)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._decode.observe(times.decode_s)
        self._inference.observe(times.prefill_s + times.decode_s)
        self._first_token.histogram.observe(first_token_s)
        self._total.observe(total_s)
        mean_length = sum(output_tokens) // max(1, len(output_tokens))
        if mean_length > 1:
            self._per_token.observe((total_s - first_token_s) / (mean_length - 1))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pagewire_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"pagewire_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> PrometheusHistogram:
        return PrometheusHistogram(
            f"pagewire_{name}", text, buckets=buckets, registry=self.registry
        )


class _Losses(Collector):
    """What the engine client counts."""

    def __init__(self, counts: FailoverCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pagewire_engine_connections_lost",
            "Connections to the engine that were lost.",
            self._counts.connections_lost,
        )
        yield CounterMetricFamily(
            "pagewire_requests_resumed",
            "Requests that went on in another engine, or in another life of it.",
            self._counts.resumed_requests,
        )


class _Counted(Collector):
    """A histogram that takes several values at once, needs no lock and can be read back."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.histogram = Histogram(bounds)
        self._name, self._text = name, text

    def collect(self) -> Iterator[Metric]:
        counted = self.histogram.snapshot()
        yield histogram_family(self._name, self._text, counted.bounds, counted.counts, counted.sum)


class _FrameFigures(Collector):
    """The frontend's end of the delta wire."""

    def __init__(self, frames: FrameCounts) -> None:
        self._frames = frames

    def collect(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "pagewire_wire_frames_dropped",
            "Frames that the frontend dropped on the delta wire, by why.",
            labels=["reason"],
        )
        for reason, count in self._frames.dropped().items():
            dropped.add_metric([reason.value], count)
        yield dropped
        yield CounterMetricFamily(
            "pagewire_wire_rewinds",
            "How often the frontend missed a frame and asked for it again.",
            value=self._frames.num_rewinds,
        )


class Collected(CollectorRegistry):
    """A registry of what was collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _labelled(
    collector: CollectorRegistry | Collector, model_name: str, labels: Mapping[str, str]
) -> Iterator[Metric]:
    """What is collected, with more labels: ours get the one that vLLM's have."""
    for metric in collector.collect():
        ours = {"model_name": model_name} if metric.name.startswith("pagewire_") else {}
        metric.samples = [
            sample._replace(labels={**ours, **labels, **sample.labels}) for sample in metric.samples
        ]
        yield metric
