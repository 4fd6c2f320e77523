"""An engine that was killed gets its adapters back before their requests come again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from pagewire.errors import FailedPreconditionError, UnavailableError
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import collect, wait_until_async
from tests.fakes.fake_adapters import write_fake_adapter
from tests.fakes.fake_engine import FakeEngineProcess


def _request(request_id: str, max_tokens: int = 60) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id, [1, 2, 3], params, adapter="a")


async def _load(client: RemoteEngineClient) -> engine_pb2.AdapterInfo:
    return await client.load_adapter(engine_pb2.LoadAdapterRequest(name="a", path="a"))


@pytest.mark.parametrize("changed", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_request_goes_on_with_its_adapter_in_another_life(
    tmp_path: Path, changed: bool
) -> None:
    write_fake_adapter(tmp_path / "a", "old")
    config = {"enable_lora": True, "lora_dir": str(tmp_path)}
    with FakeEngineProcess(config, step_time_s=0.02) as engine:
        client = RemoteEngineClient(engine.target)
        await client.start()
        try:
            version = (await _load(client)).version
            expected = (await collect(await client.submit(_request("whole")))).token_ids[0]
            stream = await client.submit(_request("cut"))
            deltas = aiter(stream)
            first = await anext(deltas)
            engine.kill()
            if changed:
                write_fake_adapter(tmp_path / "a", "new")
            await asyncio.to_thread(engine.start)
            tokens = [token for delta in first for token in delta.token_ids]
            if changed:
                with pytest.raises(FailedPreconditionError, match="not loaded in the version"):
                    async for _ in deltas:
                        pass
            else:
                async for more in deltas:
                    tokens += [token for delta in more for token in delta.token_ids]
                assert tokens == expected
            # Later requests are served, by what there is now.
            later = (await collect(await client.submit(_request("later")))).token_ids[0]
            assert (later == expected) is not changed
            listed = (await client.list_adapters()).adapters
            assert (listed[0].version == version) is not changed
        finally:
            await client.close()


async def test_a_load_that_the_engine_did_not_survive_is_told_and_can_be_asked_for_again(
    tmp_path: Path,
) -> None:
    write_fake_adapter(tmp_path / "a", "old")
    config = {"enable_lora": True, "lora_dir": str(tmp_path)}
    with FakeEngineProcess(config) as engine:
        client = RemoteEngineClient(engine.target)
        await client.start()
        try:
            engine.signal(signal.SIGSTOP)
            loading = asyncio.create_task(_load(client))
            await asyncio.sleep(0.2)
            engine.kill()
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(loading, 60)
            await wait_until_async(lambda: not client.ready, "the client notices")
            await asyncio.to_thread(engine.start)
            await wait_until_async(lambda: client.ready, "it is back")
            # Nobody was told that it is there, so that it is not.
            assert not (await client.list_adapters()).adapters
            await _load(client)
            assert (await collect(await client.submit(_request("r", 4)))).finished
        finally:
            await client.close()
