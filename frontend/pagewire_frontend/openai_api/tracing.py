"""Pure ASGI middleware that makes a span of each request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.tracing import Tracing
from pagewire_frontend.openai_api.access import METRICS_PATH, OPEN_PATHS
from pagewire_frontend.tracing import kind_of, set_current

# Asked for every few seconds, of no client's interest.
_UNTRACED = OPEN_PATHS | {METRICS_PATH}


class TracingMiddleware:
    """Goes on with the trace of the client's `traceparent`, or begins one.

    Args:
        app: what is traced.
        tracing: makes the spans.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        attributes = {"http.request.method": method}
        if request_id := scope.get("state", {}).get("request_id"):
            attributes["pagewire.request_id"] = request_id
        span = self._tracing.request_span(method, Headers(scope=scope).items(), attributes)
        set_current(span)
        status = 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except BaseException as error:
            span.fail(kind_of(error))
            raise
        finally:
            # The route and not the path, which has ids in it.
            if (route := scope.get("route")) is not None:
                span.rename(f"{method} {route.path}")
                span.set({"http.route": route.path})
            if status:
                span.set({"http.response.status_code": status})
            if status >= 500:
                span.fail(str(status))
            span.end()
