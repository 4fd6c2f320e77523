"""Two proxies for the delta wire that do harm by the dice: to whole frames, and to the bytes of the
connection below them."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq

from pagewire.delta_frames import DamagedFrameError, seal, unseal
from pagewire.v1.token_deltas_pb2 import EngineFrame, FrontendFrame
from tests.fakes.bad_inputs import tried

DROP, REPEAT, DELAY, FLIP, CUT, GARBAGE, MISROUTE, AGE, PROMISE = (
    "drop", "repeat", "delay", "flip", "cut", "garbage", "misroute", "age", "promise",
)  # fmt: skip
# What can be done to a frame of either direction; a promise acknowledges what was never sent.
HARM = (DROP, REPEAT, DELAY, FLIP, CUT, GARBAGE, MISROUTE, AGE)
TO_FRONTEND, TO_ENGINE = "to the frontend", "to the engine"
_TURN_MS = 20


class BadFrames:
    """A ROUTER that stands before the engine's and harms frames in both directions.

    Args:
        engine_endpoint: of the engine's delta wire, not encrypted.
        dice: what is done to whom.
        rate: share of the frames that are harmed, while `harmful` is set.

    Attributes:
        endpoint: for frontends.
        done: how often what was done, by direction and kind.
        most_held: most frames that waited here at a time.
        harmful: cleared, all frames pass.
    """

    def __init__(self, engine_endpoint: str, dice: random.Random, rate: float) -> None:
        self.done: Counter[tuple[str, str]] = Counter()
        self.harmful = True
        self._engine_endpoint = engine_endpoint
        self._dice = dice
        self._rate = rate
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        # Frames that are overtaken: (when they go on, how).
        self._delayed: deque[tuple[float, Callable[[], Any]]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BadFrames:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            for ready, _ in poller.poll(_TURN_MS):
                if ready is self._front:
                    identity, *parts = self._front.recv_multipart()
                    if identity not in self._backs:
                        poller.register(self._connect(identity), zmq.POLLIN)
                    self._harm(TO_ENGINE, FrontendFrame, parts[-1], self._backs[identity].send)
                else:
                    identity = ready.getsockopt(zmq.IDENTITY)
                    send = self._sender_to_frontend(identity)
                    self._harm(TO_FRONTEND, EngineFrame, ready.recv(), send)
            while self._delayed and self._delayed[0][0] < time.monotonic():
                self._delayed.popleft()[1]()

    def _connect(self, identity: bytes) -> zmq.Socket[bytes]:
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.LINGER, 0)
        back.setsockopt(zmq.IDENTITY, identity)
        back.connect(self._engine_endpoint)
        self._backs[identity] = back
        return back

    def _sender_to_frontend(self, identity: bytes) -> Callable[[bytes], Any]:
        return lambda data: self._front.send_multipart([identity, data])

    def _harm(self, where: str, kind: type, data: bytes, send: Callable[[bytes], Any]) -> None:
        dice = self._dice
        if not self.harmful or dice.random() > self._rate:
            send(data)
            return
        kinds = HARM if where == TO_FRONTEND else (*HARM, PROMISE)
        # By the dice, but nothing much more often than all else.
        least = min(self.done[where, what] for what in kinds)
        what = dice.choice([kind for kind in kinds if self.done[where, kind] <= least + 1])
        try:
            harmed = self._harmed(what, kind, data)
        except DamagedFrameError as error:  # what came is whole
            raise AssertionError(error) from error
        self.done[where, what] += 1
        tried["frames of the delta wire"] += 1
        if what == DELAY:
            self._delayed.append((time.monotonic() + dice.uniform(0, 0.05), lambda: send(data)))
        else:
            for frame in harmed:
                send(frame)

    def _harmed(self, what: str, kind: type, data: bytes) -> list[bytes]:
        dice = self._dice
        if what == REPEAT:
            return [data] * dice.randint(2, 4)
        if what == FLIP:
            flipped = bytearray(data)
            flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
            return [bytes(flipped)]
        if what == CUT:
            return [data[: dice.randrange(len(data))]]
        if what == GARBAGE:
            return [dice.randbytes(dice.randrange(300)), data]
        if what in (MISROUTE, AGE, PROMISE):
            return [self._forged(what, unseal(kind(), data)), data]
        return []  # dropped, or later

    def _forged(self, what: str, frame: Any) -> bytes:
        """A whole frame that is not for its receiver."""
        frame.ClearField("checksum")
        content = getattr(frame, frame.WhichOneof("frame"))
        if what == MISROUTE:
            frame.session_id = self._dice.randbytes(16).hex()
            if hasattr(content, "session_id"):
                content.session_id = frame.session_id
            _confuse(content)
        elif what == AGE:
            content.epoch -= 1
            _confuse(content)
        elif hasattr(content, "frame"):
            content.frame += 1_000_000
        return seal(frame)


def _confuse(content: Any) -> None:
    """Whoever takes it for its own comes to harm: tokens of other requests, frames never seen."""
    if hasattr(content, "token_id"):
        for index in range(len(content.token_id)):
            content.token_id[index] ^= 1
    if hasattr(content, "frame"):
        content.frame += 3


class BadBytes:
    """A TCP proxy that changes bytes, cuts connections, and hands bytes on late and in pieces.

    Args:
        port: of the engine's delta wire.
        dice: what is done to whom.
        rate: share of the chunks that are harmed, while `harmful` is set.

    Attributes: see BadFrames.
    """

    def __init__(self, port: int, dice: random.Random, rate: float) -> None:
        self.done: Counter[str] = Counter()
        self.harmful = True
        self._target = port
        self._dice = dice
        self._rate = rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> BadBytes:
        self._threads[0].start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(_TURN_MS / 1000)
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._carry, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as engine:
            others = {client: engine, engine: client}
            while not self._stop.is_set():
                for ready in select.select([client, engine], [], [], _TURN_MS / 1000)[0]:
                    try:
                        data = ready.recv(4096)
                        if not data or not self._harm(data, others[ready]):
                            return
                    except OSError:
                        return

    def _harm(self, data: bytes, to: socket.socket) -> bool:
        """Hands bytes on, somehow. Returns whether the connection lasts."""
        dice = self._dice
        if not self.harmful or dice.random() > self._rate:
            to.sendall(data)
            return True
        what = dice.choice(("flip", "sever", "pieces", "stall", "pieces", "stall"))
        self.done[what] += 1
        tried["harms to its bytes"] += 1
        if what == "flip":
            flipped = bytearray(data)
            flipped[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            to.sendall(flipped)
        elif what == "sever":
            to.sendall(data[: dice.randrange(len(data))])
        elif what == "pieces":
            for start in range(0, len(data), 7):
                to.sendall(data[start : start + 7])
        else:
            time.sleep(dice.uniform(0, 0.1))
            to.sendall(data)
        return what != "sever"
