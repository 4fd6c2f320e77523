"""What Prometheus is told, under the names operators know from vLLM with the prefix pagewire_."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from pagewire.errors import ErrorCode
from pagewire.outputs import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class FrontendMetrics:
    """The counters of one frontend, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._running = Gauge(
            "pagewire_num_requests_running",
            "Requests accepted and not yet ended.",
            registry=self.registry,
        )
        self._engine_ready = Gauge(
            "pagewire_engine_ready",
            "1 while the engine can serve requests.",
            registry=self.registry,
        )
        self._success = Counter(
            "pagewire_request_success",
            "Sequences that ended, by reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        self._failure = Counter(
            "pagewire_request_failure",
            "Requests refused or failed, by gRPC status code.",
            ["code"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "pagewire_prompt_tokens", "Prompt tokens of ended requests.", registry=self.registry
        )
        self._generation_tokens = Counter(
            "pagewire_generation_tokens", "Produced tokens.", registry=self.registry
        )
        self._cached_tokens = Counter(
            "pagewire_prompt_tokens_cached",
            "Prompt tokens that the prefix cache held.",
            registry=self.registry,
        )
        self._first_token = Histogram(
            "pagewire_time_to_first_token_seconds",
            "From acceptance to the first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "pagewire_request_time_per_output_token_seconds",
            "Mean time a token after the first, of each ended request.",
            buckets=_TPOT_BUCKETS,
            registry=self.registry,
        )
        self._total = Histogram(
            "pagewire_e2e_request_latency_seconds",
            "From acceptance to the end.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._queue = Histogram(
            "pagewire_request_queue_time_seconds",
            "Time in the engine's waiting queue.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            self._success.labels(reason.name.lower())

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def set_engine_ready(self, ready: bool) -> None:
        self._engine_ready.set(1 if ready else 0)

    def request_started(self) -> None:
        self._running.inc()

    def request_ended(self) -> None:
        self._running.dec()

    def request_failed(self, code: ErrorCode) -> None:
        self._failure.labels(code.name).inc()

    def sequences_finished(self, reason: FinishReason, count: int) -> None:
        self._success.labels(reason.name.lower()).inc(count)

    def tokens(self, prompt: int, cached: int, generated: int) -> None:
        self._prompt_tokens.inc(prompt)
        self._cached_tokens.inc(cached)
        self._generation_tokens.inc(generated)

    def times(self, *, queue_s: float, first_token_s: float, total_s: float, tokens: int) -> None:
        """Of a request that ran to its end. `tokens` is the mean a sequence."""
        self._queue.observe(queue_s)
        self._first_token.observe(first_token_s)
        self._total.observe(total_s)
        if tokens > 1:
            self._per_token.observe((total_s - first_token_s) / (tokens - 1))
