"""The spans of a request in the frontend. Each costs nothing where there are no traces: then no
span is ever the current one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from pagewire.errors import ErrorCode, PagewireError
from pagewire.outputs import FinishReason
from pagewire.tracing import Attributes, TraceHeaders, TraceSpan
from pagewire_frontend.generation_types import GenerationRequest

if TYPE_CHECKING:
    from pagewire_frontend.metered_generation import Usage

# Of the task that answers a request; tasks that it starts inherit it.
_current: ContextVar[TraceSpan | None] = ContextVar("pagewire_current_span", default=None)


def current_headers() -> TraceHeaders:
    """What tells the engine to go on below the current span; nothing where there is none."""
    span = _current.get()
    return () if span is None else span.headers


def set_current(span: TraceSpan) -> None:
    """From now on this task works on what the span is about."""
    _current.set(span)


def begin(name: str, attributes: Attributes | None = None) -> TraceSpan | None:
    """A part of the current span; None where there is none."""
    parent = _current.get()
    return None if parent is None else parent.child(name, attributes)


@contextmanager
def within(span: TraceSpan | None) -> Iterator[None]:
    """What happens meanwhile is a part of the span."""
    if span is None:
        yield
        return
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What happens meanwhile is a part of the current span, with a name of its own."""
    span = begin(name)
    if span is None:
        yield
        return
    try:
        with within(span):
            yield
    except BaseException as error:
        span.fail(kind_of(error))
        raise
    finally:
        span.end()


def kind_of(error: BaseException) -> str:
    """What may be told of an error: its message may quote a prompt."""
    if isinstance(error, PagewireError):
        return error.code.name.lower()
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def begin_generation(request: GenerationRequest) -> TraceSpan | None:
    """The span of one prompt's generation, with the names of OpenTelemetry's conventions."""
    if _current.get() is None:
        return None
    params = request.sampling_params
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": "text_completion" if request.answer is None else "chat",
        "gen_ai.request.model": request.model,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "pagewire.request_id": request.request_id,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return begin("generate", attributes)


def end_generation(
    span: TraceSpan, usage: Usage, reasons: Sequence[FinishReason], failure: ErrorCode | None
) -> None:
    """The generation has ended: what it took."""
    span.set(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.response.finish_reasons": [reason.name.lower() for reason in reasons],
            "gen_ai.latency.time_to_first_token": usage.first_token_s,
            "gen_ai.latency.e2e": usage.total_s,
            "pagewire.cached_tokens": usage.times.cached_tokens,
        }
    )
    if failure is not None:
        span.fail(failure.name.lower())
    span.end()
