"""HTTP connections that can't be held open, or filled, by a request that never ends, nor by a
client that does not read its answer; and clients of HTTP/1.0 or with an offer of another protocol.

uvicorn's httptools protocol bounds neither the bytes of a request's head and of a chunked body's
trailers nor the time in which a request must come, nor that in which an answer must be taken. It
drops the body of a request that offers HTTP/2, as Java's client does with each first one, and
answers HTTP/1.0 in chunks.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pagewire_frontend.openai_api.errors import error_body

logger = logging.getLogger(__name__)

# Also of what stands around a body: its trailers, and the extensions of one chunk.
MAX_HEAD_BYTES = 64 << 10
# A client may take this much longer for each byte it has sent of a body: 10 kB/s are enough.
_SECONDS_PER_BYTE = 1e-4
# Headers that offer another protocol, and the words of `connection` that name them.
_OFFERS = (b"upgrade", b"http2-settings")


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        read_timeout_s: for a request's head, and for its body besides what its length allows for.
            Set on a subclass, since uvicorn makes the instances; and so for the others.
        write_timeout_s: for the client to take so much of what waits for it in the transport's
            buffer (64 KiB) that more is written.
        on_cut_off: called when a client was cut off for not reading.
    """

    read_timeout_s = 30.0
    write_timeout_s = 60.0
    on_cut_off: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self._reading_head = True
        self._declines_offer = False
        # Since the parser last left a head, trailers or the line before a chunk behind.
        self._head_bytes = 0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_request()
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            part = "head is" if self._reading_head else "trailers or chunk extensions are"
            self._refuse(431, f"the request's {part} longer than {MAX_HEAD_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        pieces = [memoryview(data)]  # the next one last
        while pieces:
            piece = pieces.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._declines_offer:
                    return  # a CONNECT: what follows it is nothing that is spoken here
                self._declines_offer = False
                if self._is_framed_oddly():
                    self.send_400_response("Transfer-Encoding must be chunked, or not be there.")
                    return
                pieces += [piece[offer.args[0] :], memoryview(self._without_offer())]

    def _is_framed_oddly(self) -> bool:
        """Whether the parser, which has passed over the body, would have refused how long it is."""
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        return bool(codings) and codings != [b"chunked"]

    def _without_offer(self) -> bytes:
        """The head of a request that offered another protocol, as if it had not: a server may
        decline by silence (RFC 9110, 7.8). A new parser reads it, since the old one has passed over
        its body."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in _OFFERS)
                if not value:
                    continue
            if name not in _OFFERS:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"".join([*head, b"\r\n"])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_head = True
        self._body_bytes = 0
        if self._timer is None:
            self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are not headers (RFC 9110, 6.5.1), and nothing here reads them.
        if self._reading_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._head_bytes = 0
        if any(name == b"upgrade" for name, _ in self.headers) and self.parser.should_upgrade():
            self._declines_offer = True
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            unchunked = _UnchunkedSend(self.cycle)
            self.cycle.send = unchunked  # type: ignore[method-assign]  # uvicorn makes the cycles

    def on_chunk_header(self) -> None:
        """The line before a chunk is complete."""
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declines_offer:
            return
        self._reading_head = True
        self._head_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP: told in OpenAI's shape, unless an answer is under way, which this
        would seem to be a part of."""
        self._stop_timer()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            free = True
        else:
            free = not self._reading_head and not cycle.response_started
        if free:
            self._write_error(400, msg)
        self.transport.close()

    def _expect_request(self) -> None:
        self._began_at = self.loop.time()
        self._stop_timer()
        self._timer = self.loop.call_later(self.read_timeout_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cut_off(self) -> None:
        """Not `close`, which would wait until the client has read what is buffered."""
        self._write_timer = None
        logger.warning(
            "an HTTP client left its answer unread for %g s: it is cut off", self.write_timeout_s
        )
        self.on_cut_off()
        self.transport.abort()

    def _on_timer(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete and not cycle.more_body
        if answering or self.flow.read_paused:
            # It is we who are slow: the client waits for an answer, or until its body is read.
            self._timer = self.loop.call_later(self.read_timeout_s, self._on_timer)
            return
        allowed_s = self.read_timeout_s + self._body_bytes * _SECONDS_PER_BYTE
        rest_s = self._began_at + allowed_s - self.loop.time()
        if rest_s > 0.001:
            self._timer = self.loop.call_later(rest_s, self._on_timer)
            return
        if self._reading_head and not self._head_bytes:
            self.transport.close()  # it never began one
            return
        self._refuse(408, f"the request did not come within {allowed_s:.0f} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application, where nothing has been answered yet, and closes."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete or self._reading_head
        if idle or not cycle.response_started:
            self._write_error(status, message)
        self.transport.close()

    def _write_error(self, status: int, message: str) -> None:
        body = error_body(status, message)
        self.transport.write(
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )


class _UnchunkedSend:
    """What HTTP/1.0 takes: an answer whose length is not known ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._ends_with_connection = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", [])}
            self._ends_with_connection = b"content-length" not in names
            if self._ends_with_connection:
                self._cycle.chunked_encoding = False
        elif self._ends_with_connection:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
