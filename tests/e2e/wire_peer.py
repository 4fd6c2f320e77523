"""A frontend in pieces, for tests that need each piece of the wire in their own hands."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import zmq

from pagewire.conversion import sampling_params_to_proto
from pagewire.delta_frames import seal, unseal
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2, engine_pb2_grpc, token_deltas_pb2
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta, TokenStream

# For what happens at once on an idle machine.
TIMEOUT_S = 30.0


class WirePeer:
    """A session spoken by hand: blocking calls, and a DEALER that does only what it is told."""

    _names = itertools.count()

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])
        self.stub = engine_pb2_grpc.EngineStub(self.channel)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.attached = engine_pb2.AttachResponse()
        self.socket: zmq.Socket[bytes] | None = None

    def __enter__(self) -> WirePeer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.context.destroy(linger=0)
        self.channel.close()

    def attach(self, **session: str) -> engine_pb2.AttachResponse:
        self.attached = self.stub.Attach(engine_pb2.AttachRequest(**session), timeout=TIMEOUT_S)
        return self.attached

    def connect(self, *, receive_limit: int = 0) -> None:
        """A new connection; any earlier one stays open, and silent."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"peer-{next(self._names)}".encode())
        socket.setsockopt(zmq.RCVHWM, receive_limit)
        socket.setsockopt(zmq.LINGER, 0)
        if self.attached.HasField("curve_server_key"):
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self.attached.curve_server_key
        socket.connect(self.attached.stream_endpoint.replace("tcp://*", "tcp://127.0.0.1"))
        self.socket = socket

    def hello(self, **changes: Any) -> None:
        fields = {
            "session_id": self.attached.session_id,
            "secret": self.attached.secret,
            "epoch": self.attached.epoch,
        }
        hello = token_deltas_pb2.Hello(**{**fields, **changes})
        self.send(token_deltas_pb2.FrontendFrame(hello=hello, session_id=hello.session_id))

    def greet(self) -> None:
        """Attaches, connects, and waits until Hello is answered."""
        self.attach()
        self.connect()
        self.hello()
        self.next("hello_reply")

    def ack(
        self,
        frame: int,
        *,
        rewind: bool = False,
        session_id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        ack = token_deltas_pb2.Ack(
            epoch=self.attached.epoch if epoch is None else epoch, frame=frame, rewind=rewind
        )
        own = self.attached.session_id
        self.send(token_deltas_pb2.FrontendFrame(ack=ack, session_id=session_id or own))

    def send(self, frame: token_deltas_pb2.FrontendFrame) -> None:
        assert self.socket is not None
        self.socket.send(seal(frame))

    def next(self, kind: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The next frame of a kind; others on the way are dropped."""
        assert self.socket is not None
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            frame = unseal(token_deltas_pb2.EngineFrame(), self.socket.recv())
            if frame.WhichOneof("frame") == kind:
                return getattr(frame, kind)
        raise TimeoutError(f"no {kind} within {timeout_s} s")

    def submit(
        self, request_id: str, stream: int, *, prompt: Sequence[int] = (1, 2, 3), **params: Any
    ) -> engine_pb2.SubmitResponse:
        values = {"temperature": 0.0, "max_tokens": 8, **params}
        return self.stub.Submit(
            engine_pb2.SubmitRequest(
                session_id=self.attached.session_id,
                stream=stream,
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling_params_to_proto(SamplingParams(**values)),
            ),
            timeout=TIMEOUT_S,
        )

    def abort(self, request_id: str, stream: int | None = None) -> None:
        session_id = self.attached.session_id
        self.stub.Abort(
            engine_pb2.AbortRequest(session_id=session_id, request_id=request_id, stream=stream),
            timeout=TIMEOUT_S,
        )

    def stats(self) -> engine_pb2.GetStatsResponse:
        return next(iter(self.stub.GetStats(engine_pb2.GetStatsRequest(), timeout=TIMEOUT_S)))

    def num_held_blocks(self) -> int:
        stats = self.stats()
        return stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


async def wait_until_async(
    condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


def request(
    request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **params: Any
) -> EngineRequest:
    values = {"temperature": 0.0, "max_tokens": 32, **params}
    return EngineRequest(request_id, list(prompt), SamplingParams(**values))


class Collected:
    """All that a stream gave, checked for order on the way."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.finished: dict[int, TokenDelta] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.prompt_logprobs: list[Any] = []
        self.turns = 0

    def add(self, deltas: list[TokenDelta]) -> None:
        assert deltas, "an empty turn"
        self.turns += 1
        for delta in deltas:
            ids = self.token_ids.setdefault(delta.sequence_index, [])
            assert delta.sequence_index not in self.finished, "something followed the end"
            if delta.token_ids:
                assert delta.start == len(ids), "start indexes are not contiguous"
            ids += delta.token_ids
            self.logprobs.setdefault(delta.sequence_index, []).extend(delta.logprobs)
            self.prompt_logprobs += delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.finished[delta.sequence_index] = delta


async def collect(stream: TokenStream) -> Collected:
    collected = Collected()
    async for deltas in stream:
        collected.add(deltas)
    return collected
