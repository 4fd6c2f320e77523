"""Pure ASGI middleware that asks for API keys and counts requests against their limits."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.errors import PagewireError
from pagewire_frontend.access import UNCOUNTED_METHODS, Access
from pagewire_frontend.openai_api.errors import error_response

# Load balancers and Kubernetes hold no key.
OPEN_PATHS = frozenset(("/health", "/health/live", "/ping"))
METRICS_PATH = "/metrics"


class AccessMiddleware:
    """Leaves the tenant of a request in its state, or answers 401 or 429 before a byte of its body
    is read.

    Args:
        app: what is protected.
        access: keys and limits.
        open_metrics: /metrics asks for no key.
    """

    def __init__(self, app: ASGIApp, access: Access, *, open_metrics: bool) -> None:
        self._app = app
        self._access = access
        self._open_paths = OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        counted = scope["method"] not in UNCOUNTED_METHODS
        try:
            tenant = self._access.tenant(Headers(scope=scope).get("authorization"))
            if counted:
                self._access.enter(tenant)
        except PagewireError as error:
            await error_response(error)(scope, receive, send)
            return
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["tenant"] = tenant
        try:
            await self._app(scope, receive, send)
        finally:
            if counted:
                self._access.leave(tenant)
