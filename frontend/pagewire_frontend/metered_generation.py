"""What is counted of a request while it is read, and told at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.errors import ErrorCode, PagewireError
from pagewire.outputs import FinishReason, RequestTimes
from pagewire.tracing import TraceSpan
from pagewire_frontend.finished import FinishedGeneration, collect
from pagewire_frontend.generation_types import GenerationUpdate
from pagewire_frontend.metrics import FrontendMetrics
from pagewire_frontend.running_generation import RunningGeneration
from pagewire_frontend.shutdown import Shutdown
from pagewire_frontend.tracing import end_generation

request_log = logging.getLogger("pagewire_frontend.requests")


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
        "_shutdown",
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
        shutdown: Shutdown,
        field_names: Mapping[str, str],
        logged_tenant: str | None = None,
        span: TraceSpan | None = None,
    ) -> None:
        """
        Args:
            running: the request.
            started_at: when it was accepted, by `time.monotonic`.
            metrics: where it is counted.
            shutdown: tells whether who cancels it is the server.
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
        self._shutdown = shutdown
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
        except BaseException as error:
            self._end(self._shutdown.failure_of(error))
            if isinstance(error, PagewireError):
                error.field = self._field_names.get(error.field, error.field)
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
            log_end(self.request_id, self._logged_tenant, usage, self._reasons, failure)
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


def log_end(
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
        times=together(times),
    )


def together(times: Sequence[RequestTimes]) -> RequestTimes:
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
