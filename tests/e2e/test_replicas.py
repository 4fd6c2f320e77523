"""Which of several engines a frontend uses, as they come, go and change."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.errors import UnavailableError
from pagewire.v1 import engine_pb2
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.engine_client import pool, session
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.control import ControlChannel
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.server import FrontendServer
from tests.e2e.wire_peer import collect, request, wait_until_async
from tests.fakes.fake_adapters import write_fake_adapter
from tests.fakes.fake_engine import FakeEngine, fake_config
from tests.fakes.fake_engine_client import tokenizer_files
from tests.fakes.ports import free_port
from tests.fakes.replicas import (
    NUM_TOKENS,
    Load,
    connected,
    prompts,
    shares,
    state_of,
    states,
    undisturbed,
)

STEP_TIME_S = 0.01


class Site:
    """Engines of this process at addresses that stay theirs, started and stopped by number."""

    def __init__(self, stack: ExitStack, num_engines: int, **config: Any) -> None:
        self._stack = stack
        self._config = config
        self.targets = [f"127.0.0.1:{free_port()}" for _ in range(num_engines)]
        self.engines: dict[int, FakeEngine] = {}

    def start(self, number: int, *, host: str = "127.0.0.1", **knobs: Any) -> FakeEngine:
        port = int(self.targets[number].rpartition(":")[2])
        config = fake_config(**{**self._config, "host": host, "port": port})
        engine = FakeEngine(config, **{"step_time_s": STEP_TIME_S, **knobs})
        self.engines[number] = self._stack.enter_context(engine)
        return engine

    async def stop(self, number: int) -> None:
        """As at SIGTERM."""
        await asyncio.to_thread(self.engines.pop(number).server.stop, 0.1)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


async def test_a_name_is_looked_up_again_and_engines_come_and_go_with_its_addresses(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RESOLVE_INTERVAL_S", 0.1)
    monkeypatch.setattr(pool, "_LEAST_INTERVAL_S", 0.05)
    port = free_port()
    hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
    for host in hosts:
        config = fake_config(host=host, port=port)
        stack.enter_context(FakeEngine(config, step_time_s=STEP_TIME_S))
    addresses = hosts[:2]

    async def resolve(name: str) -> list[str]:
        assert name == "engines"
        if not addresses:
            raise OSError("the name server is away")
        return list(addresses)

    client = RemoteEngineClient(f"engines:{port}", resolve=resolve)
    await client.start()

    def known() -> dict[str, str]:
        return {each.name.partition(":")[0]: each.state for each in client.statuses().engines}

    try:
        await wait_until_async(
            lambda: known() == dict.fromkeys(hosts[:2], "ready"), "an engine at each address"
        )
        load = Load(client, prompts(8))
        await load.in_the_middle()
        # One goes from the name with streams in it, which may end; another comes.
        addresses[:] = hosts[1:]
        await wait_until_async(lambda: known().get(hosts[2]) == "ready", "the new one is there")
        assert known()[hosts[0]] == "retired"
        await load.tokens()
        assert client.statuses().moved == {}
        await wait_until_async(lambda: set(known()) == set(hosts[1:]), "the old one is left")
        # An outage of the name server is none of the engines.
        addresses.clear()
        await asyncio.sleep(0.3)
        assert known() == dict.fromkeys(hosts[1:], "ready")
        assert (await collect(await client.submit(request(max_tokens=3)))).finished
    finally:
        await client.close()


async def test_one_engine_by_two_names_is_one_engine(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = stack.enter_context(FakeEngine()).port
    client = RemoteEngineClient(f"127.0.0.1:{port}", f"localhost:{port}")
    await client.start()
    try:
        await wait_until_async(
            lambda: (
                sorted(engine.state for engine in client.statuses().engines)
                == ["duplicate", "ready"]
            ),
            "one of them is left alone",
        )
        assert "are the same engine" in caplog.text
        got = await collect(await client.submit(request(max_tokens=5)))
        assert len(got.token_ids[0]) == 5
    finally:
        await client.close()


async def test_a_start_needs_one_engine_only(stack: ExitStack) -> None:
    site = Site(stack, 2)
    site.start(1)
    client = RemoteEngineClient(*site.targets)
    await client.start()
    try:
        assert client.ready
        assert (await collect(await client.submit(request(max_tokens=3)))).finished
        site.start(0)
        await wait_until_async(lambda: states(client) == {"ready"}, "the other is taken, too")
    finally:
        await client.close()


async def test_a_request_that_has_ended_is_nothing_more_to_tell_an_engine_of(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def abort(self: ControlChannel, session_id: str, request_id: str, *rest: Any) -> None:
        told.append(request_id)

    monkeypatch.setattr(ControlChannel, "abort", abort)
    site = Site(stack, 2)
    for number in (0, 1):
        site.start(number, step_time_s=0.0)
    async with connected([*site.engines.values()]) as client:
        # Of some all has come before the answer to their Submit.
        asked = [request(f"r{number}", (number, 1), max_tokens=1) for number in range(40)]
        await Load(client, asked).tokens()
    assert told == []


async def test_an_engine_with_another_model_gets_no_requests_and_the_log_says_why(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(stack, 2)
    site.start(0, weights="a" * 64)
    client = RemoteEngineClient(*site.targets)
    await client.start()
    try:
        site.start(1, weights="b" * 64, max_model_len=512)
        await wait_until_async(lambda: states(client) == {"ready", "other_model"}, "it is seen")
        assert (
            f"the engine at {site.targets[1]} gets no requests, since it serves another model: "
            "max_model_len 512 and not 4096, weights_sha256 bbbbbbbbbbbb... and not aaaaaaaaaaaa..."
        ) in caplog.text
        await Load(client, prompts(6)).tokens()
        routed = {each.name: each.num_routed for each in client.statuses().engines}
        assert routed == {site.targets[0]: 6, site.targets[1]: 0}
    finally:
        await client.close()


@pytest.mark.slow
async def test_new_weights_are_rolled_out_without_a_stream_of_both(stack: ExitStack) -> None:
    """The engines of the old weights drain one after the other. New requests go to the new ones as
    soon as no old one takes any; what runs ends where it began."""
    site = Site(stack, 2)
    site.start(0, weights="old")
    site.start(1, weights="old")
    async with connected([*site.engines.values()]) as client:
        load = Load(client, prompts(8, max_tokens=4 * NUM_TOKENS))
        await load.in_the_middle()
        first = site.engines[0]
        # Its streams go to the other, which has the same weights.
        drained = asyncio.create_task(_drain(first))
        await wait_until_async(lambda: shares(client, [first]) == [0], "it is left")
        await drained
        await site.stop(0)
        site.start(0, weights="new")
        await wait_until_async(
            lambda: state_of(client, site.engines[0]) == "other_model", "it waits"
        )
        assert client.model_info.weights_sha256 == "old"
        assert not load.results.done()
        # The last of the old ones: its streams have nowhere to go, and end in it.
        drained = asyncio.create_task(_drain(site.engines[1]))
        await wait_until_async(lambda: client.model_info.weights_sha256 == "new", "the new model")
        assert client.ready
        late = await collect(await client.submit(request("late", max_tokens=5)))
        assert late.finished
        assert shares(client, [site.engines[0]]) == [0]
        await load.tokens()
        await drained


async def _drain(engine: FakeEngine) -> None:
    await asyncio.to_thread(engine.server.drain, 60.0, threading.Event())


async def test_a_stream_of_old_weights_fails_where_only_new_ones_are_left(stack: ExitStack) -> None:
    site = Site(stack, 2)
    site.start(0, weights="old")
    client = RemoteEngineClient(*site.targets, failover_window_s=60.0)
    await client.start()
    try:
        load = Load(client, [request("r", max_tokens=2000)])
        await wait_until_async(lambda: bool(load.collected[0].token_ids.get(0)), "it has begun")
        site.start(1, weights="new")
        await wait_until_async(lambda: "other_model" in states(client), "the new one is there")
        await site.stop(0)
        with pytest.raises(UnavailableError, match="another model"):
            await asyncio.wait_for(load.results, 30)
        assert (await collect(await client.submit(request("next", max_tokens=3)))).finished
    finally:
        await client.close()


async def test_an_engine_that_died_is_waited_for_before_another_model_takes_its_place(
    stack: ExitStack,
) -> None:
    site = Site(stack, 2)
    site.start(0, weights="old")
    client = RemoteEngineClient(*site.targets, failover_window_s=60.0)
    await client.start()
    try:
        site.start(1, weights="new")
        await wait_until_async(lambda: "other_model" in states(client), "the new one is there")
        link = client._started().fleet.links[site.targets[0]]
        assert link.session is not None
        link.session.give_up("as of a death")
        await site.stop(0)
        await wait_until_async(lambda: "away" in states(client), "it is gone")
        assert not client.ready
        asked = asyncio.create_task(client.submit(request("r", max_tokens=3)))
        site.start(0, weights="old")
        assert (await collect(await asyncio.wait_for(asked, 30))).finished
        assert client.model_info.weights_sha256 == "old"
    finally:
        await client.close()


def _with_adapter(request_id: str) -> EngineRequest:
    plain = request(request_id, max_tokens=20)
    return EngineRequest(request_id, plain.prompt_token_ids, plain.sampling_params, adapter="a")


async def test_adapters_are_in_every_engine_that_gets_requests_for_them(
    stack: ExitStack, tmp_path: Path
) -> None:
    write_fake_adapter(tmp_path / "a", "content")
    site = Site(stack, 2, enable_lora=True, lora_dir=str(tmp_path))
    site.start(0)
    site.start(1)

    def loaded() -> list[int]:
        adapters = [site.engines[number].built.adapters for number in (0, 1)]
        return [len(each.adapters()) if each is not None else -1 for each in adapters]

    async with connected([*site.engines.values()]) as client:
        await client.load_adapter(engine_pb2.LoadAdapterRequest(name="a", path="a"))
        assert loaded() == [1, 1]
        expected = (await collect(await client.submit(_with_adapter("one")))).token_ids
        listed = await client.list_adapters()
        assert [each.name for each in listed.adapters] == ["a"]
        assert not (await client.list_adapters(listed.revision)).adapters
        # One that comes back has it before it gets requests.
        await site.stop(0)
        await wait_until_async(lambda: "away" in states(client), "it is gone")
        site.start(0)
        await wait_until_async(lambda: states(client) == {"ready"}, "it is back")
        assert loaded() == [1, 1]
        await site.stop(1)
        again = await collect(await client.submit(_with_adapter("two")))
        assert again.token_ids == expected
        site.start(1)
        await wait_until_async(lambda: states(client) == {"ready"}, "both are there")
        await client.unload_adapter(engine_pb2.UnloadAdapterRequest(name="a"))
        assert loaded() == [0, 0]


async def test_an_engine_that_can_t_load_an_adapter_gets_no_requests_for_it(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    write_fake_adapter(tmp_path / "one" / "a", "content")
    with ExitStack() as engines:
        running = [
            engines.enter_context(
                FakeEngine(
                    fake_config(enable_lora=True, lora_dir=str(tmp_path / folder)),
                    step_time_s=STEP_TIME_S,
                )
            )
            for folder in ("one", "other")
        ]
        async with connected(running) as client:
            await client.load_adapter(engine_pb2.LoadAdapterRequest(name="a", path="a"))
            assert f"the engine at {running[1].target} has not loaded the adapter" in caplog.text
            await Load(client, [_with_adapter(f"r{number}") for number in range(6)]).tokens()
            routed = {each.name: each.num_routed for each in client.statuses().engines}
            assert routed[running[1].target] == 0


async def test_health_needs_one_engine_and_metrics_tell_them_apart(stack: ExitStack) -> None:
    site = Site(stack, 2)
    files = tokenizer_files()
    for number in (0, 1):
        site.start(number, tokenizer_files=files)
    config = FrontendConfig(
        engine=",".join(site.targets), http_port=0, grpc_port=0, grace_period_s=0.0
    )
    server = FrontendServer(config)
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def figures(name: str) -> dict[str, float]:
                text = (await http.get("/metrics")).text
                lines = [line for line in text.splitlines() if line.startswith(name + "{")]
                return {
                    target: float(line.rpartition(" ")[2])
                    for line in lines
                    for target in site.targets
                    if f'engine="{target}"' in line
                }

            async def until(name: str, wanted: list[float]) -> None:
                async with asyncio.timeout(60):
                    expected = dict(zip(site.targets, wanted, strict=True))
                    while await figures(name) != expected:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)

            await until("pagewire_engine_up", [1, 1])
            assert len(await figures("pagewire_num_requests_running")) == 2
            await site.stop(0)
            await until("pagewire_engine_up", [0, 1])
            assert (await http.get("/health")).status_code == 200
            await site.stop(1)
            await until("pagewire_engine_up", [0, 0])
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/health/live")).status_code == 200
            site.start(0, tokenizer_files=files)
            await until("pagewire_engine_up", [1, 0])
            assert (await http.get("/health")).status_code == 200
    finally:
        await server.stop()


@pytest.mark.slow
async def test_streams_of_a_stuck_engine_go_on_in_another_until_it_is_alive_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its wires answer, and its heartbeats say that a step does not end."""
    # The other one must not seem stuck while the machine is busy elsewhere.
    monkeypatch.setattr(session, "STUCK_AFTER_S", 2.0)
    goes_on = threading.Event()
    goes_on.set()
    requests = prompts(12)
    with (
        FakeEngine(step_time_s=STEP_TIME_S, on_execute=lambda plan: goes_on.wait(60)) as one,
        FakeEngine(step_time_s=STEP_TIME_S) as two,
    ):
        try:
            expected = await undisturbed(requests)
            async with connected([one, two]) as client:
                load = Load(client, requests)
                await load.in_the_middle()
                num_there = shares(client, [one])[0]
                assert num_there > 0
                goes_on.clear()
                await wait_until_async(lambda: state_of(client, one) == "stuck", "it is stuck")
                assert shares(client, [one]) == [0]
                # It answers all the while, but nobody is sent to it.
                late = [await client.submit(request(f"late{i}", max_tokens=4)) for i in range(4)]
                for stream in late:
                    assert len((await collect(stream)).token_ids[0]) == 4
                assert await load.tokens() == expected
                assert client.statuses().moved["death"] == num_there
                goes_on.set()
                await wait_until_async(lambda: states(client) == {"ready"}, "it is alive again")
                more = Load(client, prompts(12))
                await more.in_the_middle()
                assert shares(client, [one])[0] > 0
                assert await more.tokens() == expected
        finally:
            goes_on.set()
