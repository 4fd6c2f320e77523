"""Frames over a pair of connected sockets: one kind byte, a length, then the bytes."""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

_HEADER = struct.Struct("<BQ")


class FrameKind(IntEnum):
    """What a frame carries."""

    INFO = 1
    PLAN = 2
    RESULT = 3
    ERROR = 4
    LOAD_ADAPTER = 5
    DROP_ADAPTER = 6
    ADAPTER_MEMORY = 7


def send_frame(connection: socket.socket, kind: FrameKind, data: bytes) -> None:
    """Sends a whole frame.

    Raises:
        OSError: the other side is gone.
    """
    connection.sendall(_HEADER.pack(kind, len(data)) + data)


def receive_frame(connection: socket.socket) -> tuple[FrameKind, bytes]:
    """Waits for a whole frame.

    Raises:
        EOFError: the other side has closed.
        OSError: it is gone.
    """
    kind, length = _HEADER.unpack(_receive(connection, _HEADER.size))
    return FrameKind(kind), _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError
        filled += count
    return bytes(data)
