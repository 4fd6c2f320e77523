"""An interceptor that asks for API keys and counts calls against their limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from pagewire.errors import PagewireError
from pagewire_frontend.access import UNCOUNTED_CALLS, Access
from pagewire_frontend.grpc_api.errors import end, to_status
from pagewire_frontend.grpc_api.wrapping import Context, ServerInterceptor, wrapped

if TYPE_CHECKING:
    from pagewire_frontend.grpc_api.wrapping import Continuation, Handler

_HEALTH = f"/{health.SERVICE_NAME}/"
_COUNTED = "/pagewire."
# The one two-way stream that is served.
_REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
_REFUSAL_WAIT_S = 1.0


def authorization_of(metadata: Any) -> str | None:
    """The value of `authorization` among a call's metadata."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None


class AccessInterceptor(ServerInterceptor):
    """Ends calls without a key as UNAUTHENTICATED, and calls beyond the limits as
    RESOURCE_EXHAUSTED. Health checks need no key.

    A call without one ends before its message is read; of reflection, which is a two-way stream,
    after its first message, or after a second without one.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        method = handler_call_details.method
        if method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        try:
            tenant = self._access.tenant(authorization_of(handler_call_details.invocation_metadata))
        except PagewireError as error:
            return _refusing(error, waits=method == _REFLECTION)
        handler = await continuation(handler_call_details)
        counted = method.startswith(_COUNTED) and method not in UNCOUNTED_CALLS
        if handler is None or not counted:
            return handler
        return wrapped(handler, lambda context: self._counted(context, tenant))

    @asynccontextmanager
    async def _counted(self, context: Context, tenant: str) -> AsyncIterator[None]:
        """Enters just before the call runs. Not earlier: of a call that ends before its message has
        come, nobody would hear."""
        try:
            self._access.enter(tenant)
        except PagewireError as error:
            await end(context, to_status(error))

        def left(ctx: Context) -> None:
            self._access.leave(tenant)

        context.add_done_callback(left)  # type: ignore[arg-type]  # the stub's type is no Callable
        yield


def _refusing(error: PagewireError, *, waits: bool) -> Handler:
    async def refuse(requests: Any, context: Context) -> None:
        if waits:
            # Python's client of a two-way stream, refused while it sends, tells of a failed write
            # in place of the status.
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                await asyncio.wait_for(anext(aiter(requests)), _REFUSAL_WAIT_S)
        await end(context, to_status(error))

    # Of all kinds of calls this one alone waits for no message by itself.
    return grpc.stream_stream_rpc_method_handler(refuse)
