"""What the gRPC and the OpenAI API both stand on: whether the engine is there, how a request
starts, and what is counted of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pagewire.errors import (
    ErrorCode,
    FailedPreconditionError,
    InvalidArgumentError,
    PagewireError,
    UnavailableError,
)
from pagewire.outputs import FinishReason, RequestTimes
from pagewire.tracing import TraceSpan, Tracing
from pagewire_frontend.access import Access
from pagewire_frontend.adapters import AdapterDirectory
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.faults import renaming
from pagewire_frontend.finished import FinishedGeneration, collect
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import GenerationRequest, GenerationUpdate
from pagewire_frontend.metrics import FrontendMetrics
from pagewire_frontend.pooling import PooledPrompt, PoolingRequest, pool
from pagewire_frontend.running_generation import RunningGeneration
from pagewire_frontend.tracing import begin_generation, end_generation, kind_of, phase, within
from pagewire_frontend.worker_metrics import with_siblings
from pagewire_frontend.workers import Worker

request_log = logging.getLogger("pagewire_frontend.requests")

# Scrapers that come together share one question to the engine.
_SCRAPE_INTERVAL_S = 0.2
# An engine that is stuck must not hold a scrape up; Prometheus gives up after 10 s.
_SCRAPE_TIMEOUT_S = 1.0
_SAME_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times (seconds) of one request, or of several added up.

    Attributes:
        prompt_tokens, completion_tokens: counts.
        first_token_s, total_s: since the request was accepted here.
        times: its life in the engine, with the number of cached prompt tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float
    times: RequestTimes


class MeteredGeneration:
    """A running request whose tokens and times are counted as it is read.

    Iterate it to the end, or call `aclose`, which aborts what still runs.
    """

    __slots__ = (
        "_discarded_tokens",
        "_ended",
        "_field_names",
        "_first_token_at",
        "_last_token_at",
        "_logged_tenant",
        "_metrics",
        "_num_tokens",
        "_reasons",
        "_running",
        "_span",
        "_started_at",
        "_times",
        "prompt_token_ids",
        "request_id",
    )

    def __init__(
        self,
        running: RunningGeneration,
        started_at: float,
        metrics: FrontendMetrics,
        field_names: Mapping[str, str],
        logged_tenant: str | None = None,
        span: TraceSpan | None = None,
    ) -> None:
        """
        Args:
            running: the request.
            started_at: when it was accepted, by `time.monotonic`.
            metrics: where it is counted.
            field_names: what the client calls the fields that errors name.
            logged_tenant: whose it is, for a line in the log at its end; None: no such line.
            span: of a trace; it ends with the request.
        """
        self._span = span
        self._logged_tenant = logged_tenant
        self.request_id = running.request_id
        self.prompt_token_ids = running.prompt_token_ids
        self._running = running
        self._metrics = metrics
        self._field_names = field_names
        self._started_at = started_at
        self._first_token_at = 0.0
        self._num_tokens: dict[int, int] = {}
        self._discarded_tokens = 0
        self._last_token_at: dict[int, float] = {}
        self._reasons: list[FinishReason] = []
        self._times = RequestTimes()
        self._ended = False
        metrics.request_started()

    def __aiter__(self) -> MeteredGeneration:
        return self

    async def __anext__(self) -> GenerationUpdate:
        try:
            update = await self._running.__anext__()
        except StopAsyncIteration:
            self._end()
            raise
        except PagewireError as error:
            self._end(error.code)
            error.field = self._field_names.get(error.field, error.field)
            raise
        except Exception:
            self._end(ErrorCode.INTERNAL)
            raise
        now = time.monotonic()
        for delta in update.deltas:
            self._count_tokens(delta.index, delta.num_tokens, now)
            if delta.finish_reason is not None:
                self._reasons.append(delta.finish_reason)
        self._discarded_tokens += update.discarded_tokens
        if update.times is not None:
            self._times = update.times
        return update

    def _count_tokens(self, index: int, num_tokens: int, now: float) -> None:
        new = num_tokens - self._num_tokens.get(index, 0)
        if new <= 0:
            return
        if not self._first_token_at:
            self._first_token_at = now
        before = self._last_token_at.get(index)
        self._metrics.generated(new, None if before is None else now - before)
        self._num_tokens[index] = num_tokens
        self._last_token_at[index] = now

    async def aclose(self) -> None:
        """Aborts the request unless it has ended. Safe to call twice."""
        self._end(ErrorCode.CANCELLED)
        await self._running.aclose()

    def usage(self) -> Usage:
        """What was counted so far."""
        now = time.monotonic()
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(self._num_tokens.values()) + self._discarded_tokens,
            first_token_s=(self._first_token_at or now) - self._started_at,
            total_s=now - self._started_at,
            times=self._times,
        )

    async def collect(self) -> FinishedGeneration:
        """Reads to the end. Raises what the request failed with."""
        return await collect(self)

    def _end(self, failure: ErrorCode | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.request_ended()
        usage = self.usage()
        if self._logged_tenant is not None:
            _log_end(self.request_id, self._logged_tenant, usage, self._reasons, failure)
        if self._span is not None:
            end_generation(self._span, usage, self._reasons, failure)
        metrics.prompt(usage.prompt_tokens, usage.times.cached_tokens)
        for reason in set(self._reasons):
            metrics.sequences_finished(reason, self._reasons.count(reason))
        if failure is not None:
            metrics.request_failed(failure)
            if failure is ErrorCode.CANCELLED:
                unfinished = self._running.num_unfinished
                metrics.sequences_finished(FinishReason.ABORT, unfinished)
            return
        metrics.finished(
            prompt_tokens=usage.prompt_tokens,
            output_tokens=list(self._num_tokens.values()),
            first_token_s=usage.first_token_s,
            total_s=usage.total_s,
            times=usage.times,
        )


def _log_end(
    request_id: str,
    tenant: str,
    usage: Usage,
    reasons: Sequence[FinishReason],
    failure: ErrorCode | None,
) -> None:
    """One line about a request that has ended. Nothing in it was written by its client or by the
    model, but for its id."""
    outcome = "ok" if failure is None else failure.name.lower()
    fields = {
        "request_id": request_id,
        "tenant": tenant,
        "outcome": outcome,
        "finish_reasons": [reason.name.lower() for reason in reasons],
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.times.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_s": round(usage.times.queue_s, 6),
        "first_token_s": round(usage.first_token_s, 6),
        "total_s": round(usage.total_s, 6),
    }
    request_log.info(
        "request %s of tenant %s: %s, %d prompt tokens, %d completion tokens, %.3f s",
        request_id,
        tenant or "-",
        outcome,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_s,
        extra={"fields": fields},
    )


def total_usage(generations: Sequence[MeteredGeneration]) -> Usage:
    """Of a request made of several prompts: counts added up, times of the slowest."""
    usages = [generation.usage() for generation in generations]
    times = [usage.times for usage in usages]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        first_token_s=max(usage.first_token_s for usage in usages),
        total_s=max(usage.total_s for usage in usages),
        times=_together(times),
    )


def _together(times: Sequence[RequestTimes]) -> RequestTimes:
    """Counts added up, times of the slowest."""
    return RequestTimes(
        queue_s=max((one.queue_s for one in times), default=0.0),
        prefill_s=max((one.prefill_s for one in times), default=0.0),
        decode_s=max((one.decode_s for one in times), default=0.0),
        cached_tokens=sum(one.cached_tokens for one in times),
        preemptions=sum(one.preemptions for one in times),
        resumptions=sum(one.resumptions for one in times),
        steps=max((one.steps for one in times), default=0),
        step_s=max((one.step_s for one in times), default=0.0),
    )


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """The vectors of a call's prompts, in their order, and what they took."""

    vectors: list[list[float]]
    usage: Usage


def _pooled_usage(pooled: Sequence[PooledPrompt], total_s: float) -> Usage:
    return Usage(
        prompt_tokens=sum(len(one.token_ids) for one in pooled),
        completion_tokens=0,
        first_token_s=total_s,
        total_s=total_s,
        times=_together([one.times for one in pooled]),
    )


class Serving:
    """The engine as the APIs see it: absent at first, then there, and maybe away for a while.

    Attributes:
        tracing: makes spans of requests; None: nobody asked for traces. Set before the APIs are
            made.
    """

    def __init__(self, config: FrontendConfig, worker: Worker | None = None) -> None:
        self.config = config
        self._worker = worker
        self.access = Access(config)
        self.metrics = FrontendMetrics()
        self.tracing: Tracing | None = None
        self.stopping = False
        self._generation: Generation | None = None
        self._scraped_at = -_SCRAPE_INTERVAL_S
        self._asking: asyncio.Task[None] | None = None
        self._tokenizer_sha256 = ""

    def connect(self, generation: Generation) -> None:
        """The engine's model and tokenizer are known from now on."""
        self._generation = generation
        self._tokenizer_sha256 = generation.model_info.tokenizer_sha256

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """Why requests would not be served now; "" when they would."""
        if self.stopping:
            return "the server is shutting down"
        if self._generation is None:
            return f"{self.config.engines} {self._have} not been reached yet"
        if self.model_changed:
            return f"{self.config.engines} came back with another model"
        if not self._generation.client.ready:
            return f"{self.config.engines} {self._are} away"
        return ""

    @property
    def _have(self) -> str:
        return "have" if len(self.config.engine) > 1 else "has"

    @property
    def _are(self) -> str:
        return "are" if len(self.config.engine) > 1 else "is"

    @property
    def model_changed(self) -> bool:
        """Whether the engine was restarted with a tokenizer other than the one that is known."""
        generation = self._generation
        return (
            generation is not None
            and generation.model_info.tokenizer_sha256 != self._tokenizer_sha256
        )

    @property
    def generation(self) -> Generation:
        """Raises UnavailableError as long as no engine was ever reached, and until a new model's
        tokenizer is there."""
        if self._generation is None or self.model_changed:
            raise UnavailableError(self.not_ready_reason, retry_after_s=2.0)
        return self._generation

    @property
    def managed_adapters(self) -> AdapterDirectory:
        """The adapters, for who would load, unload or list them.

        Raises:
            FailedPreconditionError: the operator does not allow it.
            UnavailableError: see `generation`.
        """
        if not self.config.allow_runtime_lora_updating:
            raise FailedPreconditionError(
                "adapters are not managed at run time on this server; start the frontend with "
                "--allow-runtime-lora-updating, and the engine with --enable-lora and --lora-dir"
            )
        return self.generation.adapters

    async def scrape(self) -> bytes:
        """The metrics in Prometheus's text format, the engine's with them if it answers soon."""
        generation = self._generation
        self._tell_engines()
        now = time.monotonic()
        if generation is not None and now - self._scraped_at >= _SCRAPE_INTERVAL_S:
            self._scraped_at = now
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_engine(generation))
        if self._asking is not None and not self._asking.done():
            # A scraper that goes away must not take the answer from the others.
            await asyncio.shield(self._asking)
        if self._worker is None:
            return self.metrics.render(self._model_name)
        own = self.metrics.render(self._model_name, worker=self._worker.index)
        return await with_siblings(own, self._worker.siblings)

    def own_metrics(self) -> bytes:
        """What a worker tells a sibling that is scraped."""
        assert self._worker is not None, "there are no siblings"
        self._tell_engines()
        return self.metrics.render(self._model_name, worker=self._worker.index, with_engine=False)

    @property
    def _model_name(self) -> str:
        generation = self._generation
        return "" if generation is None else generation.model_info.served_model_name

    def _tell_engines(self) -> None:
        """How the engines are, as this process sees them."""
        self.metrics.set_engine_ready(self.ready)
        if self._generation is not None:
            self.metrics.routing.statuses = self._generation.client.statuses()

    async def _ask_engine(self, generation: Generation) -> None:
        client = generation.client
        self.metrics.engine.several = len(client.statuses().engines) > 1
        try:
            self.metrics.engine.stats = await client.stats_of_each(_SCRAPE_TIMEOUT_S)
        except PagewireError:
            self.metrics.engine.stats = {}

    async def start(
        self, request: GenerationRequest, field_names: Mapping[str, str] = _SAME_NAMES
    ) -> MeteredGeneration:
        """Hands a request to the engine.

        Args:
            request: what to generate.
            field_names: what the client calls the fields that errors name: a chat's prompt is its
                `messages`.

        Raises:
            PagewireError: it was refused.
        """
        started_at = time.monotonic()
        span = begin_generation(request)
        try:
            self._check_priority(request.priority)
            with renaming(field_names), within(span):
                running = await self.generation.start(request)
        except BaseException as error:
            if isinstance(error, PagewireError):
                self.metrics.request_failed(error.code)
            if span is not None:
                span.fail(kind_of(error))
                span.end()
            raise
        return MeteredGeneration(
            running,
            started_at,
            self.metrics,
            field_names,
            request.tenant if self.config.log_requests else None,
            span,
        )

    async def pool(
        self, request: PoolingRequest, field_names: Mapping[str, str] = _SAME_NAMES
    ) -> PooledPrompts:
        """Runs prompts that are pooled to their end; a caller that is cancelled aborts them.

        Args:
            request: the prompts, and what is made of them.
            field_names: what the client calls the fields that errors name.

        Raises:
            PagewireError: a prompt was refused or failed; the others were aborted.
        """
        started_at = time.monotonic()
        self.metrics.request_started()
        failure: ErrorCode | None = ErrorCode.CANCELLED
        pooled: list[PooledPrompt] = []
        try:
            self._check_priority(request.priority)
            with renaming(field_names), phase("pool"):
                pooled = await pool(self.generation, request)
            failure = None
        except PagewireError as error:
            failure = error.code
            raise
        except Exception:
            failure = ErrorCode.INTERNAL
            raise
        finally:
            usage = _pooled_usage(pooled, time.monotonic() - started_at)
            self.metrics.request_ended()
            if failure is not None:
                self.metrics.request_failed(failure)
            for one in pooled:
                self._count_pooled(one, usage.total_s)
            if self.config.log_requests:
                reasons = [FinishReason.STOP] * len(pooled)
                _log_end(request.request_id, request.tenant, usage, reasons, failure)
        return PooledPrompts([one.values for one in pooled], usage)

    def _count_pooled(self, one: PooledPrompt, total_s: float) -> None:
        self.metrics.prompt(len(one.token_ids), one.times.cached_tokens)
        self.metrics.sequences_finished(FinishReason.STOP, 1)
        self.metrics.finished(
            prompt_tokens=len(one.token_ids),
            output_tokens=[],
            first_token_s=total_s,
            total_s=total_s,
            times=one.times,
        )

    def _check_priority(self, priority: int) -> None:
        """Anyone may yield to others; to go before them takes the operator's word."""
        if priority < 0 and not self.config.allow_high_priority:
            raise InvalidArgumentError(
                "priority",
                "must be 0 or more (lower runs first): this server takes lower ones only when its "
                "frontend is started with --allow-high-priority",
            )

    async def start_all(
        self, requests: Sequence[GenerationRequest], field_names: Mapping[str, str]
    ) -> list[MeteredGeneration]:
        """All of them, or none.

        Raises:
            PagewireError: one was refused; those before it were aborted.
        """
        started: list[MeteredGeneration] = []
        try:
            for request in requests:
                started.append(await self.start(request, field_names))  # noqa: PERF401 - kept for the abort
        except BaseException:
            await self.close_all(started)
            raise
        return started

    async def close_all(self, generations: Sequence[MeteredGeneration]) -> None:
        """Aborts what still runs of them."""
        for generation in generations:
            await generation.aclose()

    @asynccontextmanager
    async def run(
        self, request: GenerationRequest, field_names: Mapping[str, str] = _SAME_NAMES
    ) -> AsyncIterator[MeteredGeneration]:
        """`start`, and at the end of the block the abort of what still runs."""
        generation = await self.start(request, field_names)
        try:
            yield generation
        finally:
            await generation.aclose()
