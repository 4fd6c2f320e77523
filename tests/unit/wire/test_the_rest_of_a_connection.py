"""What had come before a connection ended is taken, and can't keep it from being opened again."""

from __future__ import annotations

from unittest.mock import MagicMock

import zmq

from pagewire.delta_frames import seal
from pagewire.v1 import engine_pb2, token_deltas_pb2
from pagewire_frontend.engine_client.session import WireSession


def session(*frames: token_deltas_pb2.EngineFrame, on_heartbeat: MagicMock) -> WireSession:
    attached = engine_pb2.AttachResponse(session_id="s", secret="x", epoch=1)
    made = WireSession(
        attached, "127.0.0.1", MagicMock(), lambda *_: None, None, on_heartbeat=on_heartbeat
    )
    made._socket = MagicMock()
    made._socket.recv.side_effect = [*map(seal, frames), zmq.Again()]
    return made


def frame() -> token_deltas_pb2.EngineFrame:
    return token_deltas_pb2.EngineFrame(session_id="s")


def heartbeat() -> token_deltas_pb2.EngineFrame:
    made = frame()
    made.heartbeat.epoch = 1
    return made


async def test_a_frame_that_breaks_does_not_keep_the_others_from_being_taken() -> None:
    on_heartbeat = MagicMock(side_effect=[RuntimeError("a mistake of ours"), None])
    broken = session(heartbeat(), heartbeat(), on_heartbeat=on_heartbeat)
    broken._take_the_rest()
    assert on_heartbeat.call_count == 2


async def test_a_goodbye_that_came_before_the_cut_is_why_the_connection_ended() -> None:
    goodbye = frame()
    goodbye.goodbye.reason, goodbye.goodbye.stopping = "it stops", True
    made = session(goodbye, on_heartbeat=MagicMock())
    made._monitor = MagicMock()
    made._monitor.recv_multipart.side_effect = [[b"disconnected"], zmq.Again()]
    made._on_monitor()
    assert made.lost.result().on_purpose
