"""Frames of the delta wire as bytes: each says whose it is and ends with a checksum, so that a
damaged, cut off or misrouted one is told from a good one, and why frames were dropped.

Protobuf alone does not tell: a message that was cut between two fields is another valid message.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar
from zlib import crc32

from pagewire.v1 import token_deltas_pb2

FrameT = TypeVar("FrameT", token_deltas_pb2.EngineFrame, token_deltas_pb2.FrontendFrame)

# Field 15, fixed32: a peer in any language can read the whole as the message that it is.
_CHECKSUM = struct.Struct("<BI")
_TAG = 15 << 3 | 5


class Dropped(StrEnum):
    """Why a frame was dropped.

    `DAMAGED`: no frame, or not as it was sent. `OTHER_SESSION`: another session's, or one's that is
    not known. `OLD_EPOCH`: of another life of the engine. `REPEATED`: it came before.
    `OUT_OF_ORDER`: one before it is missing. `UNSENT`: it acknowledges what was not sent.
    `REFUSED`: a Hello with the wrong secret.
    """

    DAMAGED = "damaged"
    OTHER_SESSION = "other_session"
    OLD_EPOCH = "old_epoch"
    REPEATED = "repeated"
    OUT_OF_ORDER = "out_of_order"
    UNSENT = "unsent"
    REFUSED = "refused"


class DamagedFrameError(ValueError):
    """These bytes are no frame, or not as they were sent."""


class FrameCounts:
    """What became of one end's frames. One thread counts; any may read."""

    def __init__(self) -> None:
        self._dropped: Counter[Dropped] = Counter()
        self.num_rewinds = 0

    def drop(self, reason: Dropped) -> None:
        """A frame was dropped."""
        self._dropped[reason] += 1

    def rewind(self) -> None:
        """A receiver asked for frames again, or a sender sent them again."""
        self.num_rewinds += 1

    def dropped(self) -> Mapping[Dropped, int]:
        """Frames dropped so far, by reason, with those that never happened."""
        return {reason: self._dropped[reason] for reason in Dropped}


def seal(frame: token_deltas_pb2.EngineFrame | token_deltas_pb2.FrontendFrame) -> bytes:
    """A frame's bytes, with their CRC-32 as its last field."""
    data: bytes = frame.SerializeToString()
    return data + _CHECKSUM.pack(_TAG, crc32(data))


def unseal(frame: FrameT, data: bytes) -> FrameT:
    """Reads a frame.

    Args:
        frame: an empty one, to be filled.
        data: what came.

    Raises:
        DamagedFrameError: it is none, or another than was sent.
    """
    size = len(data) - _CHECKSUM.size
    if size < 0 or _CHECKSUM.unpack_from(data, size) != (_TAG, crc32(memoryview(data)[:size])):
        raise DamagedFrameError(f"{len(data)} bytes without the checksum of a frame")
    try:
        frame.ParseFromString(data)
    except Exception as error:
        raise DamagedFrameError(f"{len(data)} bytes: {type(error).__name__}") from None
    if frame.WhichOneof("frame") is None:
        raise DamagedFrameError("an empty frame")
    return frame
