"""A delta wire that can't be opened is a typed error, and leaves no socket behind."""

from __future__ import annotations

import pytest
import zmq

from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.control import TransportError
from pagewire_frontend.engine_client.session import WireSession


async def test_an_endpoint_that_cannot_be_opened_is_an_error_and_leaks_nothing() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8)
    attached = engine_pb2.AttachResponse(
        session_id="s", secret="x", epoch=1, stream_endpoint="nonsense://here"
    )
    session = WireSession(attached, "127.0.0.1", context, lambda number, error: None)
    for _ in range(30):
        with pytest.raises(TransportError, match="nonsense://here can't be opened"):
            await session.connect(attached)
    # Socket closing is asynchronous inside libzmq; a context with sockets left would not end.
    context.term()
