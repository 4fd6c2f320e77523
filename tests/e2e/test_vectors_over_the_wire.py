"""Vectors of an engine over both wires, and of one in this process; and through its death."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.outputs import FinishReason
from pagewire.pooling import PoolingInfo, PoolingParams, Task
from pagewire.v1 import inference_pb2
from pagewire_engine.engine import Engine
from pagewire_frontend.engine_client.base import EngineClient, EngineRequest, TokenStream
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import request, wait_until_async
from tests.fakes.fake_engine import (
    FakeEngine,
    FakeEngineProcess,
    build_fake_engine,
    fake_config,
)
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.fake_executor import vector_of_crc
from tests.fakes.frontend import grpc_stub, running_frontend
from tests.fakes.step_gate import StepGate

Reached = tuple[EngineClient, Engine, StepGate]


def pooled(request_id: str, prompt: list[int]) -> EngineRequest:
    return EngineRequest(request_id, prompt, pooling=PoolingParams(), whole=True)


def prompt_of(n: int) -> list[int]:
    return [1 + (n * 31 + k) % 900 for k in range(1 + n % 40)]


def expected(prompt: list[int]) -> list[float]:
    return vector_of_crc(zlib.crc32(array("q", prompt)))


async def vector_of(stream: TokenStream) -> list[float]:
    """The stream's one delta, which must be an end with a vector."""
    deltas = [delta async for turn in stream for delta in turn]
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [([], FinishReason.STOP)]
    assert deltas[0].vector is not None
    assert deltas[0].times is not None
    return deltas[0].vector


@pytest.fixture(scope="module")
def remote_gate() -> StepGate:
    return StepGate()


@pytest.fixture(scope="module")
def engine(remote_gate: StepGate) -> Iterator[FakeEngine]:
    with FakeEngine(fake_config(), pools=True, on_execute=remote_gate) as running:
        yield running


@pytest.fixture(params=["remote", "in_process"])
async def reached(
    request: pytest.FixtureRequest, engine: FakeEngine, remote_gate: StepGate
) -> AsyncIterator[Reached]:
    if request.param == "remote":
        remote = RemoteEngineClient(engine.target)
        await remote.start()
        yield remote, engine.built.engine, remote_gate
        remote_gate.open()
        await remote.close()
        return
    gate = StepGate()
    built = build_fake_engine(fake_config(), pools=True, on_execute=gate)
    local = InProcessEngineClient(fake_config(), build=lambda config, report: built)
    await local.start()
    yield local, built.engine, gate
    gate.open()
    await local.close()


async def test_each_prompt_gets_its_own_vector(reached: Reached) -> None:
    client, _, _ = reached
    assert client.model_info.tasks == (Task.EMBED, Task.SCORE)
    assert client.model_info.pooling is not None
    assert client.model_info.pooling.size == 2

    async def one(n: int) -> list[float]:
        return await vector_of(await client.submit(pooled(f"r{n}", prompt_of(n))))

    vectors = await asyncio.gather(*(one(n) for n in range(200)))
    assert vectors == [expected(prompt_of(n)) for n in range(200)]


async def test_an_abort_gives_the_blocks_back(reached: Reached) -> None:
    client, engine, gate = reached
    gate.shut()
    streams = [await client.submit(pooled(f"a{n}", prompt_of(20 + n))) for n in range(5)]
    await wait_until_async(lambda: gate.waiting, "a step begins")
    for stream in streams[1:]:
        await stream.abort()
    gate.open()
    assert await vector_of(streams[0]) == expected(prompt_of(20))
    await wait_until_async(lambda: not engine.stats().num_running, "nothing runs")
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


async def test_what_it_can_not_do_is_told(reached: Reached) -> None:
    client, _, _ = reached
    with pytest.raises(FailedPreconditionError, match="generates no text"):
        await client.submit(request("g"))
    with pytest.raises(FailedPreconditionError, match="no classes"):
        await client.submit(
            EngineRequest("c", [1], pooling=PoolingParams(task=Task.CLASSIFY), whole=True)
        )
    with pytest.raises(InvalidArgumentError) as caught:
        await client.submit(EngineRequest("d", [1], pooling=PoolingParams(dimensions=9)))
    assert caught.value.field == "dimensions"


async def test_prompts_go_on_in_the_engine_that_comes_after_one_that_died() -> None:
    with FakeEngineProcess(step_time_s=0.2, pools=True) as process:
        client = RemoteEngineClient(process.target, failover_window_s=60)
        await client.start()
        try:
            epoch = client.model_info.epoch
            streams = [await client.submit(pooled(f"f{n}", prompt_of(n))) for n in range(30)]
            reading = asyncio.gather(*(vector_of(stream) for stream in streams))
            process.kill()
            await wait_until_async(lambda: not client.ready, "the client notices")
            await asyncio.to_thread(process.start)
            vectors = await asyncio.wait_for(reading, 60)
            assert vectors == [expected(prompt_of(n)) for n in range(30)]
            assert client.model_info.epoch != epoch
        finally:
            await client.close()


@pytest.mark.parametrize("leaves", ["http", "grpc"])
async def test_a_client_that_leaves_aborts_its_prompts(leaves: str) -> None:
    engine = FakeEngineClient(hang_after=0, tasks=(Task.EMBED, Task.SCORE), pooling=PoolingInfo(4))
    async with running_frontend(engine) as server:
        if leaves == "http":
            url = f"http://127.0.0.1:{server.http_port}/v1/embeddings"
            async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
                asked = asyncio.ensure_future(http.post(url, json={"input": ["a", "b", "c"]}))
                await wait_until_async(lambda: len(engine.requests) == 3, "all have come")
                asked.cancel()
                await asyncio.wait([asked])
        else:
            async with grpc_stub(server) as stub:
                call = stub.Embed(inference_pb2.EmbedRequest(texts=["a", "b", "c"]))
                await wait_until_async(lambda: len(engine.requests) == 3, "all have come")
                call.cancel()
        await wait_until_async(lambda: not engine.live, "none is left")
        assert len(engine.aborted) == 3
