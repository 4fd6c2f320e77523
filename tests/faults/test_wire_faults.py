"""Processes that die, stop and come back under live streams."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from pagewire.beam_search_params import BeamSettings
from pagewire.errors import InternalError, UnavailableError
from pagewire.v1 import engine_pb2
from pagewire_engine.cli import DEAD_ENGINE_STATUS
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.engine_client.base import TokenStream
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.serving import Serving
from tests.e2e.wire_peer import (
    Collected,
    WirePeer,
    collect,
    request,
    wait_until,
    wait_until_async,
)
from tests.fakes.fake_engine import ROOT, FakeEngine, FakeEngineProcess

PARAMS = {
    "greedy": {"temperature": 0.0, "max_tokens": 400},
    "seeded": {"temperature": 1.0, "seed": 11, "n": 2, "max_tokens": 400},
    "seed_of_the_engine": {"temperature": 1.0, "max_tokens": 400},
    "logprobs": {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 300},
    # Nothing of it is told before its end: it starts over in the next engine.
    "beams": {
        "temperature": 0.0,
        "beam_search": BeamSettings(beam_width=3),
        "n": 2,
        "max_tokens": 300,
    },
}
# The streams are to last for as long as a busy machine needs to begin with a fault.
STEP_TIME_S = 0.01


@pytest.fixture
def engine() -> Iterator[FakeEngineProcess]:
    with FakeEngineProcess(step_time_s=STEP_TIME_S) as running:
        yield running


@pytest.fixture
async def client(engine: FakeEngineProcess) -> AsyncIterator[RemoteEngineClient]:
    started = RemoteEngineClient(engine.target, failover_window_s=60)
    await started.start()
    yield started
    await started.close()


class Running:
    """All of PARAMS in one engine at a time.

    Attributes:
        results: awaited, what each gave in the end.
    """

    def __init__(self, client: RemoteEngineClient) -> None:
        self._client = client
        self._begun = asyncio.Event()
        self.results = asyncio.create_task(self._run())

    async def begun(self) -> None:
        """Until each has given tokens, but for the beams, which give none before their end."""
        await asyncio.wait_for(self._begun.wait(), 60)

    async def _run(self) -> dict[str, Collected]:
        streams = {
            name: await self._client.submit(request(name, **params))
            for name, params in PARAMS.items()
        }
        silent = set(PARAMS) - {"beams"}

        async def read(name: str, stream: TokenStream) -> Collected:
            collected = Collected()
            async for deltas in stream:
                collected.add(deltas)
                silent.discard(name)
                if not silent:
                    self._begun.set()
            return collected

        results = await asyncio.gather(*(read(*named) for named in streams.items()))
        return dict(zip(streams, results, strict=True))


async def undisturbed() -> dict[str, Collected]:
    with FakeEngine() as quiet:
        client = RemoteEngineClient(quiet.target)
        await client.start()
        try:
            return await Running(client).results
        finally:
            await client.close()


def assert_same(got: dict[str, Collected], wanted: dict[str, Collected]) -> None:
    for name, expected in wanted.items():
        assert got[name].token_ids == expected.token_ids, name
        reasons = {index: end.finish_reason for index, end in got[name].finished.items()}
        assert reasons == {i: end.finish_reason for i, end in expected.finished.items()}
    logprobs = got["logprobs"]
    assert logprobs.logprobs == wanted["logprobs"].logprobs
    assert logprobs.prompt_logprobs == wanted["logprobs"].prompt_logprobs
    assert logprobs.finished[0].cumulative_logprob == pytest.approx(
        wanted["logprobs"].finished[0].cumulative_logprob, rel=1e-5
    )


async def test_streams_go_on_exactly_after_the_engine_was_killed(
    engine: FakeEngineProcess, client: RemoteEngineClient
) -> None:
    epoch = client.model_info.epoch
    running = Running(client)
    await running.begun()
    engine.kill()
    await wait_until_async(lambda: not client.ready, "the client notices")
    await asyncio.to_thread(engine.start)
    got = await asyncio.wait_for(running.results, 60)
    assert client.model_info.epoch != epoch
    assert_same(got, await undisturbed())


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_scrape_does_not_wait_for_an_engine_that_is_stuck_or_dead(
    engine: FakeEngineProcess, client: RemoteEngineClient, blow: signal.Signals
) -> None:
    stream = await client.submit(request(max_tokens=3))
    await collect(stream)
    serving = Serving(FrontendConfig())
    serving.connect(await Generation.create(client, GenerationSettings()))
    assert b'pagewire_engine_requests_finished_total{model_name="fake"} 1.0' in (
        await serving.scrape()
    )
    engine.signal(blow)
    await asyncio.sleep(0.5)
    text = await asyncio.wait_for(serving.scrape(), 20)
    assert b"pagewire_engine_requests_finished_total" not in text
    assert b"pagewire_num_requests_in_flight" in text


@pytest.mark.slow
async def test_streams_go_on_exactly_after_the_engine_stopped_on_purpose(
    engine: FakeEngineProcess, client: RemoteEngineClient
) -> None:
    epoch = client.model_info.epoch
    running = Running(client)
    await running.begun()
    engine.signal(signal.SIGTERM)
    await asyncio.to_thread(engine.wait, 60)
    await asyncio.to_thread(engine.start)
    assert_same(await asyncio.wait_for(running.results, 60), await undisturbed())
    assert client.model_info.epoch != epoch


async def test_a_draining_engine_hands_its_streams_to_its_successor(
    engine: FakeEngineProcess, client: RemoteEngineClient
) -> None:
    with WirePeer(engine.target) as operator:
        operator.stats()  # it is connected
        running = Running(client)
        await running.begun()
        drain = engine_pb2.DrainRequest(timeout_s=0.1)
        drained = await asyncio.to_thread(operator.stub.Drain, drain, timeout=30)
    assert drained.unfinished > 0
    await asyncio.sleep(0.2)
    assert not running.results.done()
    engine.signal(signal.SIGTERM)
    await asyncio.to_thread(engine.wait, 60)
    await asyncio.to_thread(engine.start)
    assert_same(await asyncio.wait_for(running.results, 60), await undisturbed())


@pytest.mark.slow
async def test_streams_go_on_exactly_after_the_engine_was_killed_while_it_drained(
    engine: FakeEngineProcess, client: RemoteEngineClient
) -> None:
    epoch = client.model_info.epoch
    with WirePeer(engine.target) as operator:
        operator.stats()  # it is connected
        running = Running(client)
        await running.begun()
        drain = engine_pb2.DrainRequest(timeout_s=0.1)
        assert (await asyncio.to_thread(operator.stub.Drain, drain, timeout=30)).unfinished > 0
    engine.kill()
    await asyncio.to_thread(engine.start)
    assert_same(await asyncio.wait_for(running.results, 60), await undisturbed())
    assert client.model_info.epoch != epoch


async def test_nothing_is_lost_while_the_engine_stands_still(
    engine: FakeEngineProcess, client: RemoteEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = Running(client)
    await running.begun()
    engine.signal(signal.SIGSTOP)
    # It stands still for longer than the silence the client bears.
    await wait_until_async(lambda: "lost the engine" in caplog.text, "the client notices")
    engine.signal(signal.SIGCONT)
    assert_same(await asyncio.wait_for(running.results, 60), await undisturbed())
    assert "the engine's session goes on" in caplog.text


async def test_an_engine_gone_for_good_fails_each_stream_after_the_window(
    engine: FakeEngineProcess,
) -> None:
    client = RemoteEngineClient(engine.target, failover_window_s=1.0)
    await client.start()
    streams = [await client.submit(request(f"r{i}", max_tokens=4000)) for i in range(2)]
    for stream in streams:
        await anext(aiter(stream))

    async def read(stream: TokenStream) -> None:
        async for _ in stream:
            pass

    reading = [asyncio.create_task(read(stream)) for stream in streams]
    engine.kill()
    killed = time.monotonic()
    late = asyncio.create_task(client.submit(request("late")))
    for task in [*reading, late]:
        with pytest.raises(UnavailableError, match="could not be reached"):
            await asyncio.wait_for(task, 30)
    assert time.monotonic() - killed > 0.8
    assert not client.ready
    # The window is over: nobody waits for another one.
    later = asyncio.create_task(client.submit(request("later")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert later.done()
    with pytest.raises(UnavailableError):
        await later
    await client.close()


async def test_a_query_of_death_fails_alone() -> None:
    poison = 666
    with FakeEngineProcess(step_time_s=STEP_TIME_S, poison=poison) as engine:
        client = RemoteEngineClient(engine.target, failover_window_s=240)
        await client.start()
        healthy = [
            asyncio.create_task(collect(await client.submit(request(f"h{i}", max_tokens=300))))
            for i in range(2)
        ]
        deadly = asyncio.create_task(collect(await client.submit(request("dead", (1, poison, 2)))))
        deaths = 0
        while not deadly.done():
            died = asyncio.create_task(asyncio.to_thread(engine.wait, 60))
            # Until it dies again, or the culprit has been found.
            await asyncio.wait((died, deadly), return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                deaths += 1
                await asyncio.to_thread(engine.start)
        with pytest.raises(InternalError, match="died of this request"):
            await deadly
        assert deaths == 3
        results = await asyncio.wait_for(asyncio.gather(*healthy), 60)
        assert all(len(result.token_ids[0]) == 300 for result in results)
        await client.close()


async def test_a_request_that_left_an_engine_which_has_not_heard_comes_back_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a Submit overtakes the abort of the place that the request had before."""
    with FakeEngine(step_time_s=STEP_TIME_S) as engine, WirePeer(engine.target) as peer:
        client = RemoteEngineClient(engine.target)
        await client.start()
        wanted = await collect(await client.submit(request("quiet", max_tokens=200)))
        stream = await client.submit(request("moved", max_tokens=200))
        collected = Collected()
        deltas = aiter(stream)
        collected.add(await anext(deltas))
        failover = stream._failover
        departures = failover._departures
        tell = departures._tell
        lost: list[str] = []

        async def lose_the_first(*told: object) -> None:
            if not lost:
                lost.append("abort")
                return
            await tell(*told)  # type: ignore[arg-type]

        monkeypatch.setattr(departures, "_tell", lose_the_first)
        failover._submission.move(stream._live, "drain")
        async for more in deltas:
            collected.add(more)
        assert collected.token_ids == wanted.token_ids
        assert lost
        assert client.statuses().moved == {"drain": 1}
        assert stream.resumptions == 0, "the engine has had it all the time"
        wait_until(lambda: peer.stats().num_running == 0, "nothing of it is left")
        await client.close()


async def test_a_killed_engines_socket_folder_is_removed_by_the_next_one(
    engine: FakeEngineProcess,
) -> None:
    def folder() -> Path:
        with WirePeer(engine.target) as peer:
            return Path(peer.attach().stream_endpoint.removeprefix("ipc://")).parent

    first = folder()
    engine.kill()
    assert first.exists()
    await asyncio.to_thread(engine.start)
    assert not first.exists()
    assert folder().exists()


def test_a_stopped_engine_removes_its_socket_folder() -> None:
    with FakeEngine() as engine:
        folder = Path(engine.server.stream_endpoint.removeprefix("ipc://")).parent
        assert folder.exists()
    assert not folder.exists()


ENGINE_WITHOUT_WORKERS = """
import sys
import pagewire_engine.build
from pagewire.errors import UnavailableError
from pagewire_engine.cli import main
from tests.fakes.fake_engine import build_fake_engine

def lose_the_worker(plan):
    raise UnavailableError("the worker process died")

pagewire_engine.build.build_engine = lambda config, report: build_fake_engine(
    config, report, on_execute=lose_the_worker
)
sys.exit(main(["fake", "--port", sys.argv[1]]))
"""


async def test_an_engine_that_lost_its_workers_ends_its_process(
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENGINE_WITHOUT_WORKERS, str(port)),
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    client = RemoteEngineClient(f"127.0.0.1:{port}", failover_window_s=60.0)
    try:
        await client.start()
        stream = await client.submit(request("unlucky"))
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == DEAD_ENGINE_STATUS
        assert b"the engine died" in stderr
        await stream.abort()
    finally:
        if process.returncode is None:
            process.kill()
        await client.close()
