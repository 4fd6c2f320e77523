"""An interceptor that refuses bytes that are no message."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from pagewire.malformed import MALFORMED, malformed_error, tolerant
from pagewire_frontend.grpc_api.errors import end, to_status
from pagewire_frontend.grpc_api.wrapping import Context, ServerInterceptor

if TYPE_CHECKING:
    from pagewire_frontend.grpc_api.wrapping import Continuation, Handler


class MalformedInterceptor(ServerInterceptor):
    """Ends calls whose request can't be read as INVALID_ARGUMENT, of every service."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        read, write = tolerant(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary is not None:
            call = _checked_call(handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(call, read, write)
        if handler.unary_stream is not None:
            inner = handler.unary_stream
            checked = _checked_generator if inspect.isasyncgenfunction(inner) else _checked_call
            return grpc.unary_stream_rpc_method_handler(checked(inner), read, write)
        if handler.stream_stream is not None:
            stream = _checked_stream(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(stream, read, write)
        return handler


async def _check(request: Any, context: Context) -> None:
    if request is MALFORMED:
        await end(context, to_status(malformed_error()))


def _checked_call(inner: Any) -> Any:
    async def call(request: Any, context: Context) -> Any:
        await _check(request, context)
        return await inner(request, context)

    return call


def _checked_generator(inner: Any) -> Any:
    async def generate(request: Any, context: Context) -> Any:
        await _check(request, context)
        async for response in inner(request, context):
            yield response

    return generate


def _checked_stream(inner: Any) -> Any:
    async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            await _check(request, context)
            yield request

    async def generate(requests: AsyncIterator[Any], context: Context) -> Any:
        async for response in inner(checked(requests, context), context):
            yield response

    return generate
