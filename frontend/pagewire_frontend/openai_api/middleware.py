"""Pure ASGI middleware: a request's id, and the limit on its body.

Not `@app.middleware("http")`, which sends each chunk of a stream through a queue and costs most of
the throughput.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire_frontend.faults import as_pagewire_error
from pagewire_frontend.openai_api.errors import RequestTooLargeError, error_response
from pagewire_frontend.request_ids import new_request_id, usable_request_id

# How long a refused upload is still read and thrown away. Closing at once would reset the
# connection, and most clients would then report that instead of the answer.
LINGER_S = 5.0
_REQUEST_ID = "x-request-id"
# In a request's state: the server's own `send`, for the body of a response that was started by the
# way of all layers. They are interested in its start only, and each costs every event of a stream.
SEND_BODY = "send_body"


class RequestIdMiddleware:
    """Takes X-Request-Id, or makes one, and echoes it. Also the last catch of unexpected errors,
    which must not reach the server's log with a request's content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_REQUEST_ID, "")
        request_id = given if usable_request_id(given) else new_request_id()
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[SEND_BODY] = send
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(raw=message["headers"])[_REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            response = error_response(as_pagewire_error(error))
            if not started:
                await response(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Refuses a body above `limit` bytes with 413: by its Content-Length before a byte is read,
    else when that many have come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            response = error_response(RequestTooLargeError(self._limit))
            await response(scope, receive, _lingering(receive, send))
            return
        num_bytes = 0
        linger = _lingering(receive, send)

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise RequestTooLargeError(self._limit)
            return message

        async def send_response(message: Message) -> None:
            await (linger if num_bytes > self._limit else send)(message)

        await self._app(scope, receive_within_limit, send_response)


def _lingering(receive: Receive, send: Send) -> Send:
    """A `send` that, once the answer is out, reads what still comes before it closes."""

    async def send_then_drain(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                more = True
                while more:
                    received = await receive()
                    more = received["type"] == "http.request" and received.get("more_body", False)
        except TimeoutError:
            pass  # a slow or endless upload: now it may be cut
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_then_drain
