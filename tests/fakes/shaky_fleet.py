"""Engines, and the ways to them, in which everything may happen in any order: what is under way is
an event, and dice choose the next one. No sockets, no threads, no real time.

The frontend's failover and links, and the engine's session table, are the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pagewire.delta_frames import seal
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2, token_deltas_pb2
from pagewire_engine.sessions import Session
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.control import DrainingError, TransportError
from pagewire_frontend.engine_client.mailbox import SequenceRecord
from pagewire_frontend.engine_client.session import Loss, WireSession
from tests.fakes.stepped_engine import Deadly, Life
from tests.fakes.virtual_time import VirtualTime

BEAT_S = 1.0
_CRAWL_S = 0.2


@dataclass(eq=False)
class Call:
    """A control call under way.

    Attributes:
        active: whether its caller still waits.
        handled: whether the engine has had it.
    """

    handle: Callable[[Life], Any]
    answer: asyncio.Future[Any]
    active: bool = True
    handled: bool = False
    result: Any = None
    error: BaseException | None = None


class Control:
    """A channel to an engine: what its caller sends, and what it hears, may be lost or late."""

    host, outdated = "fake", False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = False

    async def _call(self, handle: Callable[[Life, Call], Any], timeout_s: float = 10.0) -> Any:
        if self._closed:
            raise TransportError("closed")
        call = Call(lambda life: handle(life, call), asyncio.get_running_loop().create_future())
        self._engine.calls.append(call)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.answer
        except TimeoutError:
            raise TransportError("no answer") from None
        finally:
            call.active = False

    async def close(self) -> None:
        self._closed = True

    async def attach(self, session_id: str, secret: str, *, timeout_s: float = 10.0) -> Any:
        def handle(life: Life, call: Call) -> Any:
            session, resumed = life.table.attach(session_id, secret)
            return engine_pb2.AttachResponse(
                session_id=session.session_id,
                secret=session.secret,
                epoch=life.epoch,
                heartbeat_interval_ms=1000,
                resumed=resumed,
                draining=life.draining,
                stream_endpoint=self._engine.name,
            )

        return await self._call(handle, timeout_s)

    async def detach(self, session_id: str, secret: str, *, timeout_s: float) -> None:
        await self._call(lambda life, call: life.table.detach(session_id, secret), timeout_s)

    async def model_info(self) -> ModelInfo:
        return await self._call(
            lambda life, call: ModelInfo(
                "m", "a", "f", "cpu", 50_000, 4096, 16, 64, (), SamplingParams(), "", 0, life.epoch
            )
        )

    async def submit(
        self,
        session_id: str,
        stream: int,
        request: EngineRequest,
        *,
        seed: int | None,
        past: list[SequenceRecord] | None,
        adapter_version: str = "",
    ) -> engine_pb2.SubmitResponse:
        records = past or [SequenceRecord() for _ in range(request.sampling_params.n)]
        produced = {
            i: len(record.token_ids)
            for i, record in enumerate(records)
            if record.finish_reason is None
        }

        def handle(life: Life, call: Call) -> Any:
            if life.draining:
                raise DrainingError("it drains")
            if not call.active:
                return None
            drawn = self._engine.dice.getrandbits(32) if seed is None else seed
            if request.sampling_params.beam_search is not None:
                drawn = 0
            self._engine.seeds.setdefault(request.request_id, set()).add(drawn)
            opened, new = life.table.open_stream(
                session_id, stream, request.request_id, produced, drawn
            )
            if new:
                life.submit(opened, request, produced)
            return engine_pb2.SubmitResponse(seed=opened.seed)

        return await self._call(handle, 30.0)

    async def abort(
        self,
        session_id: str,
        request_id: str,
        sequence: int | None,
        reason: FinishReason,
        stream: int | None = None,
    ) -> None:
        def handle(life: Life, call: Call) -> Any:
            if not call.active:
                return
            find = life.table.dismiss if sequence is None else life.table.find
            found = find(session_id, request_id, stream)
            if found is None:
                return
            if sequence is None:
                life.abort(found.engine_id, None, reason)
            elif sequence in found.logs:
                life.abort(found.engine_id, sequence, reason)

        await self._call(handle)


class FakeWire(WireSession):
    """A session without a socket."""

    engine: Engine

    @property
    def connected(self) -> bool:
        return self.engine.connection is self and not self.lost.done()

    async def connect(self, attached: engine_pb2.AttachResponse) -> None:
        life = self.engine.life
        known = life and life.table.by_id(self.session_id)
        if life is None or known is None:
            raise TransportError("nobody answers Hello")
        self.lost = asyncio.get_running_loop().create_future()
        life.table.connect(known, self.session_id.encode(), self.engine.time.now)
        self.engine.connection = self
        self.engine.frames.clear()

    def disconnect(self) -> None:
        if self.engine.connection is self:
            self._receive_the_rest()
            self.engine.connection = None
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._wakeups.flush()
        self._lose(Loss("closed here"))

    def _receive_the_rest(self) -> None:
        for _ in range(self.engine.dice.randint(0, len(self.engine.frames))):
            self._take(self.engine.frames.popleft())

    def _send(self, frame: token_deltas_pb2.FrontendFrame) -> None:
        life = self.engine.life
        known = life and life.table.by_id(self.session_id)
        if known is not None and frame.HasField("ack"):
            known.acknowledge(frame.ack.frame, self.engine.time.now)

    def receive(self, data: bytes) -> None:
        self._take(data)
        self._acknowledge_soon()


@dataclass(eq=False)
class Engine:
    """An engine with all its lives, and what is on its way to it and from it."""

    name: str
    time: VirtualTime
    dice: random.Random
    deadly: Deadly | None
    epochs: itertools.count[int]
    seeds: dict[str, set[int]]
    life: Life | None = None
    calls: list[Call] = field(default_factory=list)
    frames: deque[bytes] = field(default_factory=deque)
    connection: FakeWire | None = None
    deaths: int = 0
    next_beat: float = 0.0

    def start(self) -> None:
        self.life = Life(next(self.epochs), self.deadly)

    def die(self) -> None:
        assert self.life is not None
        self.life = None

    def events(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [
            partial(self._answer if call.handled else self._arrive, call) for call in self.calls
        ]
        if self.frames and self.connection is not None:
            found += [self._deliver] * 3
        life, connection = self.life, self.connection
        if (
            connection is not None
            and not connection.lost.done()
            and (life is None or life.epoch != connection.epoch)
        ):
            found.append(self._notice)
        if life is None:
            found.append(self.start)
            return found
        if life.busy and not life.hung:
            found += [self._work] * 3
        if life.outbox:
            found += [self._route] * 2
        if self._sendable() is not None:
            found += [self._send] * 2
        if self.time.now >= self.next_beat and self.connection is not None:
            found.append(self._beat)
        return found

    def _arrive(self, call: Call) -> None:
        life, call.handled = self.life, True
        try:
            if life is None:
                raise TransportError("nobody listens")
            call.result = call.handle(life)
        except Exception as error:
            call.error = error

    def _answer(self, call: Call) -> None:
        self.calls.remove(call)
        if call.answer.done():
            return
        if call.error is not None:
            call.answer.set_exception(call.error)
        else:
            call.answer.set_result(call.result)

    def lose_a_call(self) -> None:
        """Or its answer."""
        if self.calls:
            call = self.dice.choice(self.calls)
            call.error, call.handled = TransportError("the connection broke"), True

    def _work(self) -> None:
        assert self.life is not None
        if not self.life.work():
            self.deaths += 1
            self.die()

    def _route(self) -> None:
        assert self.life is not None
        self.life.table.route(self.life.outbox.pop(0))

    def _sendable(self) -> Session | None:
        connection, life = self.connection, self.life
        if connection is None or life is None:
            return None
        known = life.table.by_id(connection.session_id)
        return known if known is not None and known.can_send(self.time.now) else None

    def _send(self) -> None:
        known, life = self._sendable(), self.life
        assert known is not None
        assert life is not None
        self.frames.append(seal(known.take_frame(life.step, self.time.now)))

    def _deliver(self) -> None:
        assert self.connection is not None
        self.connection.receive(self.frames.popleft())

    def _beat(self) -> None:
        assert self.connection is not None
        assert self.life is not None
        life, self.next_beat = self.life, self.time.now + BEAT_S
        frame = token_deltas_pb2.EngineFrame(session_id=self.connection.session_id)
        frame.heartbeat.epoch = life.epoch
        frame.heartbeat.step = life.step
        frame.heartbeat.step_age_ms = 40_000 if life.hung else 0
        frame.heartbeat.busy = life.busy
        frame.heartbeat.draining = life.draining
        frame.heartbeat.num_running = len(life.running)
        self.frames.append(seal(frame))

    def _notice(self) -> None:
        assert self.connection is not None
        self.connection._lose(Loss("the connection was cut"))

    def kill(self) -> None:
        if self.life is not None:
            self.die()

    def cut(self) -> None:
        """The delta wire, of which the engine hears too."""
        if self.connection is not None and self.life is not None:
            self.life.table.disconnect(self.connection.session_id.encode())
            self._notice()

    def bury(self) -> None:
        """The engine has not heard of the frontend for too long."""
        if self.life is not None:
            self.life.table.bury_the_silent(self.time.now + 1e6)
            if self.connection is not None:
                self._notice()

    def hang(self) -> None:
        if self.life is not None:
            self.life.hung = not self.life.hung

    def drain(self) -> None:
        if self.life is not None:
            self.life.draining = True
            self.next_beat = 0.0

    def stop(self) -> None:
        """As after a drain that has lasted long enough."""
        life, connection = self.life, self.connection
        if life is None or not life.draining:
            return
        life.fail_all()
        while life.outbox:
            self._route()
        while self._sendable() is not None:
            self._send()
        while connection is not None and self.frames:
            connection.receive(self.frames.popleft())
        if connection is not None:
            connection._lose(Loss("goodbye", on_purpose=True))
        self.die()


class ShakyFleet:
    """Chooses what comes next, by dice.

    Args:
        engines: how many.
        deadly: a prompt that kills engines.

    Attributes:
        faults: names of `Engine`'s methods, which strike at random moments.
        seeds: in which each request was begun, by its id.
    """

    def __init__(self, seed: int, engines: int, deadly: Deadly | None) -> None:
        self.dice = random.Random(seed)
        self.time = VirtualTime()
        self.seeds: dict[str, set[int]] = {}
        epochs = itertools.count(1)
        self.engines = [
            Engine(f"e{i}", self.time, self.dice, deadly, epochs, self.seeds)
            for i in range(engines)
        ]
        self.faults: list[str] = []
        self.turns = 0
        # How often two things happen before anybody has looked at the first.
        self._haste = self.dice.choice([0.0, 0.1, 0.4])
        self._sleep = self.dice.choice([0.02, 0.2, 0.5])

    def next_event(self, timeout: float | None) -> None:
        """See VirtualTime."""
        self.turns += 1
        assert self.turns < 300_000, "it does not come to an end"
        if timeout == 0 and self.dice.random() >= self._haste:
            return
        events = [event for engine in self.engines for event in engine.events()]
        if self.faults and self.dice.random() < 0.02:
            getattr(self.dice.choice(self.engines), self.faults.pop())()
        elif events and self.dice.random() >= self._sleep:
            self.dice.choice(events)()
        elif timeout != 0:
            if not self.faults:
                self._end_faults()
            rest = 60.0 if timeout is None else timeout
            most = _CRAWL_S if events else BEAT_S
            self.time.now += min(rest, self.dice.uniform(0.001, most))

    def _end_faults(self) -> None:
        for engine in self.engines:
            if engine.life is not None:
                engine.life.hung = False
                if engine.life.draining and self.dice.random() < 0.1:
                    engine.stop()
