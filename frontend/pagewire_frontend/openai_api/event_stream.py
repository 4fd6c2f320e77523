"""Server-sent events as a bare ASGI response: no framework between a token and the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.errors import PagewireError
from pagewire_frontend.faults import as_pagewire_error
from pagewire_frontend.openai_api.errors import describe, error_response
from pagewire_frontend.openai_api.middleware import SEND_BODY
from pagewire_frontend.shutdown import Shutdown

Emit = Callable[[bytes], Awaitable[None]]
ResultT = TypeVar("ResultT")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies such as nginx would otherwise hold the tokens back.
    (b"x-accel-buffering", b"no"),
]


def error_event(error: PagewireError) -> bytes:
    """An error in mid-stream, as OpenAI's clients of completions and chats know it."""
    return b"data: " + describe(error) + b"\n\n"


class EventStream(Response):
    """Runs the writers side by side, each emitting whole events, and closes with `[DONE]`, or what
    else stands for it.

    The status line waits for the first event, so that an error before it still gets its own status.
    A client that leaves ends the writers.

    Args:
        writers: one a prompt.
        closing: the events before `[DONE]`, made once all writers are done.
        cleanup: awaited at the end, however it comes: aborts what still runs.
        keepalive_s: seconds of silence before a comment is sent.
        shutdown: ends the writers when the server's grace period is over.
        done: the last event.
        failed: the events of an error in mid-stream.
    """

    def __init__(
        self,
        writers: Sequence[Callable[[Emit], Awaitable[None]]],
        closing: Callable[[], bytes],
        cleanup: Callable[[], Awaitable[None]],
        keepalive_s: float,
        shutdown: Shutdown,
        *,
        done: bytes = DONE,
        failed: Callable[[PagewireError], bytes] = error_event,
    ) -> None:
        super().__init__()
        self._writers = writers
        self._closing = closing
        self._cleanup = cleanup
        self._keepalive_s = keepalive_s
        self._shutdown = shutdown
        self._done = done
        self._failed = failed
        self._started = False
        self._sent_at = 0.0
        self._now = asyncio.get_running_loop().time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_body = scope.get("state", {}).get(SEND_BODY, send)
        self._sent_at = self._now()
        producing = asyncio.create_task(self._produce(scope, receive))
        attending = asyncio.create_task(self._attend(receive))
        try:
            await asyncio.wait({producing, attending}, return_when=asyncio.FIRST_COMPLETED)
            if producing.done():
                producing.result()
        finally:
            await _cancel(producing, attending)
            await self._cleanup()

    async def _emit(self, events: bytes) -> None:
        if not self._started:
            self._started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
            )
        self._sent_at = self._now()
        await self._send_body({"type": "http.response.body", "body": events, "more_body": True})

    async def _produce(self, scope: Scope, receive: Receive) -> None:
        try:
            await run_all([self._run(writer) for writer in self._writers])
            last = self._closing() + self._done
        except Exception as exception:
            error = as_pagewire_error(exception)
            if not self._started:
                self._started = True
                await error_response(error)(scope, receive, self._send)
                return
            last = self._failed(error) + self._done
        if last:
            await self._emit(last)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, writer: Callable[[Emit], Awaitable[None]]) -> None:
        async with self._shutdown.bounds():
            await writer(self._emit)

    async def _attend(self, receive: Receive) -> None:
        """Keeps a silent stream alive; returns when the client has left."""
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        try:
            while True:
                silence = self._now() - self._sent_at
                await asyncio.wait({leaving}, timeout=max(0.0, self._keepalive_s - silence))
                if leaving.done():
                    return
                if self._now() - self._sent_at >= self._keepalive_s:
                    await self._emit(KEEPALIVE)
        finally:
            await _cancel(leaving)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has left, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[ResultT]) -> ResultT | None:
    """The result of `work`, or None when the client left first and `work` was cancelled."""
    working: asyncio.Future[ResultT] = asyncio.ensure_future(work)
    leaving: asyncio.Future[None] = asyncio.ensure_future(wait_for_disconnect(receive))
    both: set[asyncio.Future[Any]] = {working, leaving}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _cancel(working, leaving)


async def run_all(work: Sequence[Awaitable[ResultT]]) -> list[ResultT]:
    """All results. The first failure is raised, after the others were cancelled."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as lost
