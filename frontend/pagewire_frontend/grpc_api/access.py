"""An interceptor that asks for API keys and counts calls against their limits."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health

from pagewire.errors import PagewireError
from pagewire_frontend.access import UNCOUNTED_CALLS, Access
from pagewire_frontend.grpc_api.errors import end, to_status

Context = grpc.aio.ServicerContext[Any, Any]

if TYPE_CHECKING:  # generic in the stubs alone
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor

_HEALTH = f"/{health.SERVICE_NAME}/"
_COUNTED = "/pagewire."


def authorization_of(metadata: Any) -> str | None:
    """The value of `authorization` among a call's metadata."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None


class AccessInterceptor(_ServerInterceptor):
    """Ends calls without a key as UNAUTHENTICATED, before their message is read, and calls beyond
    the limits as RESOURCE_EXHAUSTED. Health checks need no key."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        try:
            tenant = self._access.tenant(authorization_of(handler_call_details.invocation_metadata))
        except PagewireError as error:
            return _refusing(error)
        handler = await continuation(handler_call_details)
        counted = method.startswith(_COUNTED) and method not in UNCOUNTED_CALLS
        if handler is None or not counted:
            return handler
        return self._counted(handler, tenant)

    def _counted(self, handler: Handler, tenant: str) -> Handler:
        """The handler of a call whose answer is one message or many, entering before it runs. Not
        earlier: of a call that ends before its message has come, nobody would hear."""
        access = self._access
        inner: Any = handler.unary_unary or handler.unary_stream
        assert inner is not None, "pagewire's calls take one message"

        def left(ctx: Context) -> None:
            access.leave(tenant)

        async def enter(context: Context) -> None:
            try:
                access.enter(tenant)
            except PagewireError as error:
                await end(context, to_status(error))
            context.add_done_callback(left)  # type: ignore[arg-type]  # the stub's type is no Callable

        async def call(request: Any, context: Context) -> Any:
            await enter(context)
            return await inner(request, context)

        async def generate(request: Any, context: Context) -> Any:
            await enter(context)
            async for response in inner(request, context):
                yield response

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            generate if inspect.isasyncgenfunction(inner) else call,
            handler.request_deserializer,
            handler.response_serializer,
        )


def _refusing(error: PagewireError) -> Handler:
    async def refuse(requests: Any, context: Context) -> None:
        await end(context, to_status(error))

    # Of all kinds of calls this one waits for no message.
    return grpc.stream_stream_rpc_method_handler(refuse)
