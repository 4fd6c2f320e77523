"""What the gRPC and the OpenAI API both stand on: whether the engine is there, how a request
starts, and what is counted of it."""

from __future__ import annotations

import asyncio
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
from pagewire.outputs import FinishReason
from pagewire.tracing import Tracing
from pagewire_frontend.access import Access
from pagewire_frontend.adapters import AdapterDirectory
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.faults import renaming
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.metered_generation import MeteredGeneration, Usage, log_end, together
from pagewire_frontend.metrics import FrontendMetrics
from pagewire_frontend.pooling import PooledPrompt, PoolingRequest, pool
from pagewire_frontend.shutdown import Shutdown
from pagewire_frontend.tracing import begin_generation, kind_of, phase, within
from pagewire_frontend.worker_metrics import with_siblings
from pagewire_frontend.workers import Worker

# Scrapers that come together share one question to the engine.
_SCRAPE_INTERVAL_S = 0.2
# An engine that is stuck must not hold a scrape up; Prometheus gives up after 10 s.
_SCRAPE_TIMEOUT_S = 1.0
_SAME_NAMES: Mapping[str, str] = {}


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
        times=together([one.times for one in pooled]),
    )


class Serving:
    """The engine as the APIs see it: absent at first, then there, and maybe away for a while.

    Attributes:
        tracing: makes spans of requests; None: nobody asked for traces. Set before the APIs are
            made.
        stopping: no new request is taken.
        shutdown: ends what still runs at the end of the grace period.
    """

    def __init__(self, config: FrontendConfig, worker: Worker | None = None) -> None:
        self.config = config
        self._worker = worker
        self.access = Access(config)
        self.metrics = FrontendMetrics()
        self.tracing: Tracing | None = None
        self.stopping = False
        self.shutdown = Shutdown()
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
            self.metrics.request_failed(self.shutdown.failure_of(error))
            if span is not None:
                span.fail(kind_of(error))
                span.end()
            raise
        return MeteredGeneration(
            running,
            started_at,
            self.metrics,
            self.shutdown,
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
        failure: ErrorCode | None = None
        pooled: list[PooledPrompt] = []
        try:
            self._check_priority(request.priority)
            with renaming(field_names), phase("pool"):
                pooled = await pool(self.generation, request)
        except BaseException as error:
            failure = self.shutdown.failure_of(error)
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
                log_end(request.request_id, request.tenant, usage, reasons, failure)
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
