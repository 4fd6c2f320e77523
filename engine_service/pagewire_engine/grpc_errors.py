"""The one place where the engine's errors become gRPC statuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagewire.errors import InternalError, PagewireError, shortened
from pagewire.malformed import MALFORMED, malformed_error, tolerant

logger = logging.getLogger(__name__)


def status_of(error: PagewireError) -> grpc.Status:
    """The gRPC status of an error, with google.rpc.BadRequest for the field at fault and RetryInfo
    where a retry makes sense."""
    details: list[any_pb2.Any] = []
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=shortened(error.field), description=shortened(error.message)
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    message = shortened(str(error))
    rich = status_pb2.Status(code=int(error.code), message=message, details=details)
    status: grpc.Status = rpc_status.to_status(rich)
    return status


def _packed(message: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not generic when run
    """Answers a handler's PagewireError with its status, any other exception with INTERNAL, and
    bytes that are no message with INVALID_ARGUMENT."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/pagewire."):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guarded_unary(handler.unary_unary),
                request_deserializer=tolerant(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _guarded_stream(handler.unary_stream),
                request_deserializer=tolerant(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return handler


def _check(request: Any) -> None:
    if request is MALFORMED:
        raise malformed_error()


def _guarded_unary(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            _check(request)
            return method(request, context)
        except PagewireError as error:
            failure = error
        except Exception as error:
            failure = _internal(error)
        # Outside of the handlers: it raises, to unwind.
        return context.abort_with_status(status_of(failure))

    return call


def _guarded_stream(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            _check(request)
            yield from method(request, context)
            return
        except PagewireError as error:
            failure = error
        except Exception as error:
            failure = _internal(error)
        context.abort_with_status(status_of(failure))

    return call


def _internal(error: Exception) -> PagewireError:
    logger.exception("a control call failed", exc_info=error)
    return InternalError("the engine failed on this call; its log says why")
