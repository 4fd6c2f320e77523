"""Replies that are one message must not be larger than their clients take: these would only be told
`Received message larger than max`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from google.protobuf.message import Message

from pagewire.errors import ResourceExhaustedError

# What gRPC's clients take unless told otherwise.
CLIENT_DEFAULT = 4 << 20
# Of a call's metadata: a client that takes more says so, since gRPC itself does not.
METADATA_KEY = "pagewire-max-reply-bytes"

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Any]])


def largest_reply(metadata: Any) -> int:
    """Bytes that the caller takes in a message."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str) and value.isdecimal():
            # More digits would make no sense, and Python refuses thousands of them.
            return int(value[:20])
    return CLIENT_DEFAULT


def check_reply_size(num_bytes: int, metadata: Any, remedy: str) -> None:
    """
    Args:
        num_bytes: of the reply.
        metadata: of the call.
        remedy: what to call instead.

    Raises:
        ResourceExhaustedError: the caller would not take it.
    """
    limit = largest_reply(metadata)
    if num_bytes > limit:
        raise ResourceExhaustedError(
            f"the reply has {num_bytes} bytes, and gRPC clients take {limit} in a message: "
            f"{remedy}; or raise the client's grpc.max_receive_message_length and say so in the "
            f"call's metadata, {METADATA_KEY}"
        )


def fits_clients(remedy: str) -> Callable[[HandlerT], HandlerT]:
    """Checks what a method answers with before it is sent. Inside of `answers_errors`.

    Args:
        remedy: what to call instead where it is too large.
    """

    def decorate(handler: HandlerT) -> HandlerT:
        @wraps(handler)
        async def checked(self: Any, request: Any, context: Any) -> Message:
            reply: Message = await handler(self, request, context)
            check_reply_size(reply.ByteSize(), context.invocation_metadata(), remedy)
            return reply

        return checked  # type: ignore[return-value]  # wraps() loses the callable's own type

    return decorate
