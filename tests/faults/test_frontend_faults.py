"""A frontend that stands still or is killed, as the engine sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagewire_engine import sessions
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import WirePeer, collect, request, wait_until
from tests.fakes.fake_engine import ROOT, FakeEngine, FakeEngineProcess, fake_config
from tests.fakes.standstill import stand_still

FRONTEND = """
import asyncio, json, sys
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.remote import RemoteEngineClient

async def main():
    client = RemoteEngineClient(sys.argv[1])
    await client.start()
    params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]))
    stream = await client.submit(EngineRequest("r", [1, 2, 3], params))
    tokens = []
    async for deltas in stream:
        if not tokens:
            print("started", flush=True)
        for delta in deltas:
            assert delta.start == len(tokens)
            tokens += delta.token_ids
    print(json.dumps(tokens), flush=True)
    await client.close()

asyncio.run(main())
"""


@contextlib.contextmanager
def frontend_process(target: str, max_tokens: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FRONTEND, target, str(max_tokens)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "started"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("wire", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_nothing_is_lost_while_the_frontend_stands_still(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ACK_TIMEOUT_S", 0.3)
    endpoint = "tcp://127.0.0.1:*" if wire == "tcp" else None
    with (
        FakeEngine(fake_config(stream_endpoint=endpoint), step_time_s=0.001) as engine,
        WirePeer(engine.target) as peer,
        frontend_process(engine.target, 4000) as frontend,
    ):
        assert frontend.stdout is not None
        stand_still(frontend.pid)
        sessions_now = list(engine.server._streams.sessions.all())
        (session,) = [each for each in sessions_now if each.streams]
        bases: set[int] = set()

        def overdue_twice() -> bool:
            bases.add(session._base_frame)
            return len(bases) > 2

        # Overdue twice: frames were sent again into a connection that nobody reads.
        wait_until(overdue_twice, "frames are sent again")
        frontend.send_signal(signal.SIGCONT)
        tokens = json.loads(frontend.stdout.readline())
        frontend.wait(60)
        assert len(tokens) == 4000
        wait_until(lambda: peer.num_held_blocks() == 0, "free blocks")


def test_a_killed_frontends_blocks_come_back_after_the_session_timeout() -> None:
    config = fake_config(session_timeout_s=1.5)
    with FakeEngine(config, step_time_s=0.01) as engine, WirePeer(engine.target) as peer:
        with frontend_process(engine.target, 4000) as frontend:
            wait_until(lambda: peer.stats().num_running == 1, "it runs")
            frontend.kill()
            frontend.wait()
        wait_until(lambda: peer.num_held_blocks() == 0, "the blocks come back")
        assert peer.stats().num_sessions == 0


@pytest.mark.slow
async def test_a_session_the_engine_has_buried_is_opened_again_and_its_streams_go_on() -> None:
    with (
        FakeEngineProcess({"session_timeout_s": 1.0}, step_time_s=0.01) as impatient,
        WirePeer(impatient.target) as peer,
        frontend_process(impatient.target, 500) as frontend,
    ):
        assert frontend.stdout is not None
        # Silent for longer than its session lives.
        stand_still(frontend.pid)
        wait_until(lambda: peer.stats().num_sessions == 0, "the session is buried")
        frontend.send_signal(signal.SIGCONT)
        tokens = json.loads(await asyncio.to_thread(frontend.stdout.readline))
    with FakeEngine() as engine:
        client = RemoteEngineClient(engine.target)
        await client.start()
        wanted = await collect(await client.submit(request(max_tokens=500)))
        await client.close()
    assert tokens == wanted.token_ids[0]
