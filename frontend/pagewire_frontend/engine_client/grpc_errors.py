"""From the statuses of the engine's control calls to typed errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pagewire.errors import PagewireError, error_from_code

_DETAILS_KEY = "grpc-status-details-bin"


def typed_error(error: grpc.aio.AioRpcError) -> PagewireError:
    """The PagewireError that the engine raised, or that describes what the channel says."""
    rich = _rich_status(error)
    code: int = error.code().value[0]
    message, field, retry_after_s = error.details() or error.code().name, "", None
    for detail in rich.details if rich is not None else ():
        bad_request = error_details_pb2.BadRequest()
        retry_info = error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
            message = bad_request.field_violations[0].description
        elif detail.Unpack(retry_info):
            retry_after_s = retry_info.retry_delay.ToMilliseconds() / 1000
    return error_from_code(code, message, field, retry_after_s)


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return None
            return status
    return None
