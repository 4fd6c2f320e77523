"""The one place where errors become HTTP responses, in OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from pagewire.errors import ErrorCode, PagewireError, ResourceExhaustedError
from pagewire_frontend.errors import TokenIdsOnlyError
from pagewire_frontend.faults import retry_delay_s

_STATUS = {
    ErrorCode.CANCELLED: 400,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.NOT_FOUND: 404,
    # OpenAI's clients retry 409 by themselves; a live request id would only be refused again.
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.FAILED_PRECONDITION: 400,
    # It is the request that does not fit the model: nothing of the server's is broken.
    ErrorCode.UNIMPLEMENTED: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNAUTHENTICATED: 401,
}
_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error"}


class RequestTooLargeError(ResourceExhaustedError):
    """The body is longer than this server reads."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes (--max-request-bytes)")


def http_status(error: PagewireError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestTooLargeError):
        return 413
    return _STATUS[error.code]


def error_body(status: int, message: str, param: str = "", code: str | None = None) -> bytes:
    """`{"error": {...}}` as OpenAI words it."""
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param or None, "code": code}
    return orjson.dumps({"error": error})


def describe(error: PagewireError) -> bytes:
    """An error's body, for a response or an event in mid-stream."""
    if isinstance(error, TokenIdsOnlyError):
        error = TokenIdsOnlyError("POST /v1/completions with a list of token ids as prompt")
    status = http_status(error)
    code = error.code.name.lower()
    if error.code == ErrorCode.NOT_FOUND and error.field == "model":
        code = "model_not_found"
    elif status == 413:
        code = "request_too_large"
    return error_body(status, str(error), error.field, code)


def error_response(error: PagewireError) -> Response:
    """The response of a request that failed before its answer began."""
    headers = {}
    retry_after_s = retry_delay_s(error)
    status = http_status(error)
    if retry_after_s is not None and status in (429, 503, 504):
        headers["retry-after"] = str(math.ceil(retry_after_s))
    elif status == 429:
        # OpenAI's clients retry each 429 that does not say this.
        headers["x-should-retry"] = "false"
    if status == 413:
        headers["connection"] = "close"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(describe(error), status, headers, media_type="application/json")
