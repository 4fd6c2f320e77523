"""What an interceptor does around a call: handlers of one message or many, asynchronous generators
or coroutines that write."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]

if TYPE_CHECKING:  # generic in the stubs alone
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
else:
    ServerInterceptor = grpc.aio.ServerInterceptor


def wrapped(
    handler: Handler, around: Callable[[Context], AbstractAsyncContextManager[Any]]
) -> Handler:
    """The handler of a call that takes one message, run within `around`."""
    inner: Any = handler.unary_unary or handler.unary_stream
    assert inner is not None, "pagewire's calls take one message"

    async def call(request: Any, context: Context) -> Any:
        async with around(context):
            return await inner(request, context)

    async def generate(request: Any, context: Context) -> Any:
        async with around(context):
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
