"""An interceptor that makes a span of each of pagewire's calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from pagewire.tracing import TraceSpan, Tracing
from pagewire_frontend.grpc_api.wrapping import Context, ServerInterceptor, wrapped
from pagewire_frontend.tracing import kind_of, set_current

if TYPE_CHECKING:
    from pagewire_frontend.grpc_api.wrapping import Continuation, Handler

_TRACED = "/pagewire."


class TracingInterceptor(ServerInterceptor):
    """Goes on with the trace of the call's `traceparent`, or begins one.

    Args:
        tracing: makes the spans.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_TRACED):
            return handler
        name = handler_call_details.method.lstrip("/")
        return wrapped(handler, partial(self._span, name))

    @asynccontextmanager
    async def _span(self, name: str, context: Context) -> AsyncIterator[TraceSpan]:
        service, _, method = name.partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        span = self._tracing.request_span(name, context.invocation_metadata() or (), attributes)
        # Of this call's task, which ends with the call.
        set_current(span)
        code = 0
        try:
            yield span
        except grpc.aio.AbortError:
            code = _number(context.code())
            span.fail(grpc.StatusCode.UNKNOWN.name if not code else _names()[code])
            raise
        except BaseException as error:
            code = grpc.StatusCode.CANCELLED.value[0]
            span.fail(kind_of(error))
            raise
        finally:
            span.set({"rpc.grpc.status_code": code})
            span.end()


def _number(code: Any) -> int:
    """A status code as gRPC's core has it, or as an enum."""
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else int(code or 0)


def _names() -> dict[int, str]:
    return {code.value[0]: code.name.lower() for code in grpc.StatusCode}
