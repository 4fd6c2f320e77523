"""Processes that may open no more files: what runs goes on, new connections wait or are refused,
nothing spins or dies, and all is well when there is room again."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from pagewire.errors import UnavailableError
from pagewire_frontend.engine_client.base import TokenStream
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import Collected, WirePeer, collect, request, wait_until_async
from tests.fakes.fake_engine import FakeEngineProcess
from tests.fakes.real_processes import RealFrontend

SPARE = 6
STRANGERS = 40
WATCH_S = 2.0


@contextlib.contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """Lets a process open only a few more files than it has open."""
    most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()) + 1 + SPARE
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, most[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, most)


@contextlib.contextmanager
def strangers(*ports: int) -> Iterator[None]:
    """Connections that say nothing, more than the process can take."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            for _ in range(STRANGERS):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.connect(("127.0.0.1", port))
        yield


async def assert_idles(pid: int) -> None:
    """A process that has little to do but to refuse takes little time."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    await asyncio.sleep(WATCH_S)
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    assert spent < WATCH_S / 2, f"{spent} s of processor time in {WATCH_S} s"


class Running:
    """A stream that is read for as long as somebody looks."""

    def __init__(self, stream: TokenStream) -> None:
        self.collected = Collected()
        self._stream = stream
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for deltas in self._stream:
            self.collected.add(deltas)

    @property
    def num_tokens(self) -> int:
        return len(self.collected.token_ids.get(0, ()))

    async def goes_on(self) -> None:
        before = self.num_tokens
        await wait_until_async(lambda: self.num_tokens > before + 5, "the stream goes on")
        assert not self._task.done()

    async def stop(self) -> None:
        await self._stream.abort()
        await asyncio.wait_for(self._task, 60)


async def test_streams_of_an_engine_without_descriptors_go_on() -> None:
    with FakeEngineProcess(step_time_s=0.02) as engine, WirePeer(engine.target) as peer:
        client = RemoteEngineClient(engine.target, failover_window_s=60)
        await client.start()
        wire = Path(peer.attach().stream_endpoint.removeprefix("ipc://"))
        running = Running(await client.submit(request(max_tokens=4000)))
        await running.goes_on()
        with few_descriptors(engine.pid), strangers(engine.port):
            # An accept without a descriptor would be the end of it: libzmq aborts.
            await wait_until_async(lambda: not wire.exists(), "it listens no more")
            await assert_idles(engine.pid)
            new = RemoteEngineClient(engine.target, failover_window_s=0.5)
            with pytest.raises(UnavailableError):
                await new.start()
            # Who is there already is served.
            await running.goes_on()
            beside = await collect(await client.submit(request("beside", max_tokens=5)))
            assert len(beside.token_ids[0]) == 5
        # There is room again, also for somebody new.
        late = RemoteEngineClient(engine.target, failover_window_s=60)
        await late.start()
        assert len((await collect(await late.submit(request("late")))).token_ids[0]) == 32
        await late.close()
        await running.goes_on()
        await running.stop()
        await client.close()
        assert engine.alive


@contextlib.asynccontextmanager
async def connected(frontend: RealFrontend) -> AsyncIterator[httpx.AsyncClient]:
    address = frontend.http.replace("localhost", "127.0.0.1")
    # Its idle connections stay, however long the rest takes.
    limits = httpx.Limits(keepalive_expiry=None)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
        yield http


def ports(frontend: RealFrontend) -> tuple[int, int]:
    return int(frontend.http.rpartition(":")[2]), int(frontend.grpc.rpartition(":")[2])


async def num_completed(http: httpx.AsyncClient, max_tokens: int) -> int:
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": max_tokens, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


async def test_a_frontend_without_descriptors_serves_those_who_are_there() -> None:
    with FakeEngineProcess(step_time_s=0.02) as engine, RealFrontend(engine.target) as frontend:
        async with connected(frontend) as http:
            # Two connections, which the client keeps.
            await asyncio.gather(num_completed(http, 80), num_completed(http, 80))
            with few_descriptors(frontend.pid), strangers(*ports(frontend)):
                running = asyncio.create_task(num_completed(http, 300))
                await asyncio.sleep(WATCH_S)
                assert await num_completed(http, 5) == 5
                assert await running == 300
        async with connected(frontend) as http:  # a new one
            assert await num_completed(http, 5) == 5
        assert frontend.alive


@pytest.mark.slow
async def test_a_frontend_without_descriptors_finds_its_restarted_engine() -> None:
    with FakeEngineProcess(step_time_s=0.02) as engine, RealFrontend(engine.target) as frontend:
        async with connected(frontend) as http:
            await num_completed(http, 1)
            running = asyncio.create_task(num_completed(http, 300))
            await asyncio.sleep(0.5)
            with few_descriptors(frontend.pid), strangers(*ports(frontend)):
                engine.kill()
                await asyncio.to_thread(engine.start)
                await asyncio.sleep(WATCH_S)
            assert await running == 300
        assert frontend.alive


@pytest.mark.slow
async def test_a_frontend_without_descriptors_idles() -> None:
    with FakeEngineProcess(step_time_s=0.02) as engine, RealFrontend(engine.target) as frontend:
        async with connected(frontend) as http:
            await asyncio.gather(num_completed(http, 80), num_completed(http, 80))
            with few_descriptors(frontend.pid), strangers(*ports(frontend)):
                await assert_idles(frontend.pid)
                told = "HTTP takes no new connections"
                await wait_until_async(lambda: told in frontend.output, "it is told")
