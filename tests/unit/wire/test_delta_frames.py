"""The delta wire's frames as bytes: what was changed on the way is told from what was sent."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.delta_frames import DamagedFrameError, seal, unseal
from pagewire.v1.token_deltas_pb2 import EngineFrame, FrontendFrame, StepDeltas

_UINT32 = st.integers(0, 2**32 - 1)


@st.composite
def frames(draw: st.DrawFn) -> EngineFrame:
    deltas = StepDeltas(
        epoch=draw(st.integers(0, 2**64 - 1)),
        frame=draw(_UINT32),
        stream=draw(st.lists(_UINT32, max_size=4)),
        token_id=draw(st.lists(_UINT32, max_size=20)),
    )
    return EngineFrame(session_id=draw(st.text("0123456789abcdef", max_size=32)), deltas=deltas)


@given(frames())
def test_what_was_sent_is_read(frame: EngineFrame) -> None:
    read = unseal(EngineFrame(), seal(frame))
    read.ClearField("checksum")
    assert read == frame


@given(frames(), st.data())
def test_no_changed_bit_goes_unnoticed(frame: EngineFrame, data: st.DataObject) -> None:
    sealed = bytearray(seal(frame))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedFrameError):
        unseal(EngineFrame(), bytes(sealed))


@given(frames())
def test_no_cut_goes_unnoticed(frame: EngineFrame) -> None:
    # Protobuf would take many of these for whole messages.
    sealed = seal(frame)
    for length in range(len(sealed)):
        with pytest.raises(DamagedFrameError):
            unseal(EngineFrame(), sealed[:length])


@given(st.binary(max_size=100))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(DamagedFrameError):
        unseal(FrontendFrame(), data)


@pytest.mark.parametrize(
    "data", [pickle.dumps({"ack": 1}), FrontendFrame(session_id="a").SerializeToString(), b""]
)
def test_what_has_no_checksum_is_no_frame(data: bytes) -> None:
    with pytest.raises(DamagedFrameError):
        unseal(FrontendFrame(), data)


def test_a_sealed_frame_that_says_nothing_is_none() -> None:
    with pytest.raises(DamagedFrameError, match="empty"):
        unseal(FrontendFrame(), seal(FrontendFrame(session_id="a")))
