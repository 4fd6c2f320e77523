"""The one place where errors become gRPC statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagewire.errors import PagewireError, shortened
from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.errors import ChatTemplateError, TokenIdsOnlyError
from pagewire_frontend.faults import as_pagewire_error, retry_delay_s


def _fields(message: type[Message]) -> frozenset[str]:
    return frozenset(message.DESCRIPTOR.fields_by_name)


_SAMPLING_FIELDS = _fields(sampling_pb2.SamplingParams)
_BEAM_FIELDS = _fields(sampling_pb2.BeamSearchParams)
_TEXT_FIELDS = _fields(inference_pb2.TextParams)
_TEMPLATE_FIELDS = _fields(inference_pb2.ChatTemplateParams)

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Any]])


def field_path(field: str, *, beam_search: bool = False) -> str:
    """The path of a field in the request message: `top_p` is `sampling_params.top_p` there.

    Args:
        field: as errors name it.
        beam_search: the request asks for one.
    """
    if field == "prompt_token_ids":
        return "token_ids.ids"
    name = field.split("[", 1)[0].split(".", 1)[0]
    # What both have is sampling's where nobody asked for beams.
    if name in _BEAM_FIELDS and (beam_search or name not in _SAMPLING_FIELDS):
        return f"beam_search.{field}"
    if name in _SAMPLING_FIELDS:
        return f"sampling_params.{field}"
    if name in _TEXT_FIELDS:
        return f"text_params.{field}"
    if name in _TEMPLATE_FIELDS:
        return f"template_params.{field}"
    return field


def to_status(error: PagewireError, *, beam_search: bool = False) -> status_pb2.Status:
    """google.rpc.Status: BadRequest names the field, RetryInfo says when a retry makes sense, and
    ChatTemplateFault where in a template it went wrong.

    Args:
        error: what the call failed with.
        beam_search: the call asked for one.
    """
    if isinstance(error, TokenIdsOnlyError):
        error = TokenIdsOnlyError("call Generate with token_ids")
    path = field_path(error.field, beam_search=beam_search)
    message = f"{path}: {error.message}" if path else error.message
    details: list[Message] = []
    if path:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=shortened(path), description=shortened(error.message)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ChatTemplateError):
        details.append(inference_pb2.ChatTemplateFault(line=error.line, column=error.column))
    retry_after_s = retry_delay_s(error)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=int(error.code), message=shortened(message))
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: PagewireError, request: Message
) -> NoReturn:
    """Ends the call with the error's status, in the words of its request."""
    asks = request.DESCRIPTOR.fields_by_name
    beam_search = "beam_search" in asks and request.HasField("beam_search")
    await end(context, to_status(error, beam_search=beam_search))


async def end(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> NoReturn:
    """Ends the call with a status.

    Raises:
        AbortError: always, for gRPC to take.
        CancelledError: the client has left before it had read all that came before.
    """
    packed = rpc_status.to_status(status)
    try:
        await context.abort(packed.code, packed.details, packed.trailing_metadata)
    except grpc.aio.InternalError:
        # Not an AbortError: gRPC takes no other than its own.
        raise asyncio.CancelledError("the client has left") from None


def answers_errors(handler: HandlerT) -> HandlerT:
    """Turns what a servicer's method raises into the call's status, and ends what runs past the
    grace period of a server that stops. The servicer knows its `_serving`."""

    @wraps(handler)
    async def wrapped(self: Any, request: Any, context: Any) -> Any:
        try:
            async with self._serving.shutdown.bounds():
                return await handler(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, as_pagewire_error(error), request)

    return wrapped  # type: ignore[return-value]  # wraps() loses the callable's own type
