"""An engine that stops says so, after all it has to tell."""

from __future__ import annotations

import time

import zmq

from pagewire.delta_frames import seal, unseal
from pagewire.outputs import FinishReason
from pagewire.v1 import token_deltas_pb2
from pagewire_engine.outputs import SequenceOutput, StepOutputs
from pagewire_engine.stream_endpoint import StreamEndpoint
from pagewire_engine.token_stream import LoopHealth, TokenStreams

TIMEOUT_MS = 5000


def test_what_was_published_goes_before_the_goodbye() -> None:
    # Its thread is never started: what it would do is done here, step by step.
    streams = TokenStreams(
        StreamEndpoint(None, "127.0.0.1"), 7, lambda _: None, lambda: LoopHealth(0, 0.0, False)
    )
    session, _ = streams.sessions.attach("", "")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(streams.endpoint.advertised)

        def receive() -> token_deltas_pb2.EngineFrame:
            assert dealer.poll(TIMEOUT_MS)
            return unseal(token_deltas_pb2.EngineFrame(), dealer.recv())

        hello = token_deltas_pb2.FrontendFrame()
        hello.hello.session_id, hello.hello.secret = session.session_id, session.secret
        hello.hello.epoch = 7
        dealer.send(seal(hello))
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while session.identity is None:
            streams._receive(time.monotonic())
            assert time.monotonic() < deadline
        assert receive().WhichOneof("frame") == "hello_reply"

        stream, _ = streams.sessions.open_stream(session.session_id, 1, "r", {0: 0}, 0)
        end = SequenceOutput(stream.engine_id, 0, 0, [5, 6], finish_reason=FinishReason.LENGTH)
        streams.publish(StepOutputs(1, [end]))
        streams.stop()
        deltas = receive().deltas
        assert list(deltas.token_id) == [5, 6]
        assert [end.stream for end in deltas.finished] == [1]
        assert receive().goodbye.stopping
