"""RemoteEngineClient and InProcessEngineClient over a fake engine: one behaviour, two ways."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.beam_search_params import BeamSettings
from pagewire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire_engine.step import StepPlan
from pagewire_frontend.engine_client.base import EngineClient, EngineRequest, PastSequence
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import Collected, collect, request, wait_until_async
from tests.fakes.fake_engine import VOCAB_SIZE, FakeEngine, build_fake_engine, fake_config
from tests.fakes.step_gate import StepGate

STEP_TIME_S = 0.002
FILES = {"tokenizer.json": b"{}" * 50_000, "tokenizer_config.json": b"{}"}


@pytest.fixture(scope="module")
def gate() -> StepGate:
    """Of `engine`."""
    return StepGate()


@pytest.fixture(scope="module")
def engine(gate: StepGate) -> Iterator[FakeEngine]:
    config = fake_config(max_num_seqs=64)
    knobs = {"step_time_s": STEP_TIME_S, "tokenizer_files": FILES, "on_execute": gate}
    with FakeEngine(config, **knobs) as running:
        yield running


class Reached:
    """A client, a look at the engine's blocks, and a hold on its steps."""

    def __init__(
        self, client: EngineClient, used_blocks: Callable[[], int], gate: StepGate
    ) -> None:
        self.client = client
        self.used_blocks = used_blocks
        self.gate = gate

    async def hold(self) -> None:
        """Until the gate is opened, a step that has begun computes nothing."""
        self.gate.shut()
        await wait_until_async(lambda: self.gate.waiting, "a step begins")


@pytest.fixture(params=["remote", "in_process"])
async def reached(
    request: pytest.FixtureRequest, engine: FakeEngine, gate: StepGate
) -> AsyncIterator[Reached]:
    client: EngineClient
    if request.param == "remote":
        client = RemoteEngineClient(engine.target)
        await client.start()
        stats = engine.built.engine.stats
    else:
        gate = StepGate()
        client = InProcessEngineClient(
            fake_config(max_num_seqs=64),
            build=lambda config, report: build_fake_engine(
                config, report, step_time_s=STEP_TIME_S, tokenizer_files=FILES, on_execute=gate
            ),
        )
        await client.start()
        stats = client.engine_loop.stats

    def num_held_blocks() -> int:
        now = stats()
        return now.num_blocks - now.num_free_blocks - now.num_cached_blocks

    yield Reached(client, num_held_blocks, gate)
    gate.open()
    await client.close()


async def test_a_client_knows_the_model_and_its_tokenizer(reached: Reached) -> None:
    info = reached.client.model_info
    assert (info.served_model_name, info.vocab_size, info.max_model_len) == (
        "fake",
        VOCAB_SIZE,
        4096,
    )
    assert reached.client.ready
    assert dict(await reached.client.fetch_tokenizer()) == FILES
    assert len(info.tokenizer_sha256) == 64


async def test_all_sequences_arrive_whole_and_end_once(reached: Reached) -> None:
    stream = await reached.client.submit(request(n=3, seed=5, temperature=1.0, max_tokens=20))
    got = await collect(stream)
    assert [len(got.token_ids[index]) for index in range(3)] == [20, 20, 20]
    assert len({tuple(ids) for ids in got.token_ids.values()}) == 3
    assert {end.finish_reason for end in got.finished.values()} == {FinishReason.LENGTH}
    assert all(end.times is not None for end in got.finished.values())


async def test_a_request_with_a_past_goes_on_from_it(reached: Reached) -> None:
    asked = request("whole", n=2, seed=3, temperature=1.0, max_tokens=16)
    whole = await collect(await reached.client.submit(asked))
    past = (
        PastSequence(whole.token_ids[0][:5]),
        PastSequence(whole.token_ids[1], whole.finished[1].finish_reason),
    )
    rest = Collected()
    rest.token_ids[0] = list(past[0].token_ids)  # what comes begins after these
    async for deltas in await reached.client.submit(replace(asked, request_id="rest", past=past)):
        rest.add(deltas)
    assert list(rest.finished) == [0]
    assert rest.token_ids == {0: whole.token_ids[0]}


async def test_a_beam_searchs_results_arrive_together(reached: Reached) -> None:
    beams = BeamSettings(beam_width=4)
    stream = await reached.client.submit(
        request(n=3, beam_search=beams, temperature=0.0, logprobs=1, max_tokens=20)
    )
    turns = [turn async for turn in stream]
    assert len(turns) == 1
    assert [delta.sequence_index for delta in turns[0]] == [0, 1, 2]
    assert all(len(delta.token_ids) == len(delta.logprobs) == 20 for delta in turns[0])
    sums = [delta.cumulative_logprob for delta in turns[0]]
    assert sums == sorted(sums, reverse=True)
    await until_free(reached)


async def test_an_aborted_beam_search_frees_its_blocks(reached: Reached) -> None:
    beams = BeamSettings(beam_width=4)
    stream = await reached.client.submit(
        request(n=3, beam_search=beams, temperature=0.0, max_tokens=2000)
    )
    await wait_until_async(lambda: reached.used_blocks() > 4, "each beam holds blocks")
    await stream.abort()
    await until_free(reached)


async def until_free(reached: Reached) -> None:
    await wait_until_async(lambda: reached.used_blocks() == 0, "no block is held")


async def test_more_beams_than_run_at_a_time_are_refused_by_name(reached: Reached) -> None:
    beams = BeamSettings(beam_width=65)
    stream = await reached.client.submit(request(beam_search=beams, temperature=0.0))
    with pytest.raises(InvalidArgumentError) as caught:
        await collect(stream)
    assert caught.value.field == "beam_width"
    assert "max_num_seqs=64" in caught.value.message


async def test_times_come_with_the_first_token_and_with_the_end(reached: Reached) -> None:
    # No other test's prompt: nothing of it is cached. 599 tokens in chunks of 256; then the engine
    # waits until the first token was read, or one message might tell of all.
    reached.gate.let_pass(3)
    stream = await reached.client.submit(request(prompt=tuple(range(101, 700)), max_tokens=20))
    times = [delta.times for delta in await anext(aiter(stream))]
    reached.gate.open()
    times += [delta.times async for deltas in stream for delta in deltas]
    told = [one for one in times if one is not None]
    first, end = told[0], told[-1]
    assert len(told) == 2
    assert times[0] is first
    assert times[-1] is end
    assert (first.steps, end.steps) == (3, 3 + 19)
    assert first.prefill_s == end.prefill_s >= 3 * STEP_TIME_S
    assert first.decode_s == 0.0
    assert end.decode_s >= 19 * STEP_TIME_S
    assert 22 * STEP_TIME_S <= end.step_s <= end.prefill_s + end.decode_s


async def test_a_client_asks_what_the_engine_counts(reached: Reached) -> None:
    before = await reached.client.stats(5.0)
    await collect(await reached.client.submit(request(prompt=(1, 2, 3), max_tokens=5)))
    stats = await reached.client.stats(5.0)
    assert stats.num_prompt_tokens - before.num_prompt_tokens == 3
    assert stats.num_generation_tokens - before.num_generation_tokens == 5
    assert stats.num_requests_finished - before.num_requests_finished == 1
    assert stats.num_blocks == 512
    steps = sum(stats.iteration_tokens.counts) - sum(before.iteration_tokens.counts)
    assert steps == 5
    assert stats.iteration_tokens.sum - before.iteration_tokens.sum == 3 + 4
    assert stats.step_time.sum - before.step_time.sum >= 5 * STEP_TIME_S


async def test_a_client_watches_the_engine(reached: Reached) -> None:
    stream = await reached.client.submit(request(max_tokens=4000))
    async with aclosing(reached.client.watch_stats(100, with_window=True)) as watching:
        async for stats in watching:
            if stats.num_running and stats.window.requests:
                break
    assert len(stats.window.blocks) == stats.num_blocks
    view = stats.window.requests[0]
    assert all(stats.window.blocks[block] == 1 for block in view.blocks)
    await stream.abort()
    once = [one async for one in reached.client.watch_stats(0, with_window=False)]
    assert len(once) == 1
    assert not once[0].HasField("window")


async def test_both_ways_give_the_same_tokens(engine: FakeEngine) -> None:
    remote = RemoteEngineClient(engine.target)
    local = InProcessEngineClient(fake_config(), build=build_fake_engine)
    await asyncio.gather(remote.start(), local.start())
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 9, "n": 2}):
        wanted = await collect(await remote.submit(request(**params)))
        assert (await collect(await local.submit(request(**params)))).token_ids == wanted.token_ids
    await asyncio.gather(remote.close(), local.close())


async def test_logprobs_come_with_their_tokens(reached: Reached) -> None:
    prompt = tuple(range(1, 600))
    stream = await reached.client.submit(
        request(prompt=prompt, logprobs=2, prompt_logprobs=3, max_tokens=20)
    )
    got = await collect(stream)
    assert [p.token.token_id for p in got.logprobs[0]] == got.token_ids[0]
    assert all(len(position.top) == 2 for position in got.logprobs[0])
    # Every position but the first, although the prompt took several chunks.
    assert [p.token.token_id for p in got.prompt_logprobs] == list(prompt[1:])
    assert all(len(position.top) == 3 for position in got.prompt_logprobs)
    total = sum(position.token.logprob for position in got.logprobs[0])
    assert got.finished[0].cumulative_logprob == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_prompt_logprobs_are_whole_though_the_first_token_is_the_last(
    reached: Reached, max_tokens: int
) -> None:
    prompt = tuple(range(1, 50))
    params = {"prompt_logprobs": 1, "max_tokens": max_tokens}
    got = await collect(await reached.client.submit(request(prompt=prompt, **params)))
    assert [p.token.token_id for p in got.prompt_logprobs] == list(prompt[1:])
    assert len(got.token_ids[0]) == max_tokens


async def test_a_stop_token_is_named(reached: Reached) -> None:
    free = await collect(await reached.client.submit(request(max_tokens=8)))
    stop = free.token_ids[0][3]
    got = await collect(await reached.client.submit(request(max_tokens=8, stop_token_ids=[stop])))
    end = got.finished[0]
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert got.token_ids[0] == free.token_ids[0][: free.token_ids[0].index(stop) + 1]


async def test_a_sequence_that_a_stop_string_ended_is_silent_and_frees_its_blocks(
    reached: Reached,
) -> None:
    stream = await reached.client.submit(request(n=2, temperature=1.0, seed=1, max_tokens=3000))
    async for deltas in stream:
        if deltas[0].start > 100:
            break
    await reached.hold()
    both = reached.used_blocks()
    await stream.finish_sequence(0)
    reached.gate.let_pass(2)
    await wait_until_async(lambda: reached.used_blocks() < both - 3, "the blocks of one come back")
    reached.gate.open()
    assert {delta.sequence_index for delta in await anext(aiter(stream))} == {1}
    await stream.finish_sequence(1)
    await wait_until_async(lambda: reached.used_blocks() == 0, "all blocks come back")
    with pytest.raises(StopAsyncIteration):
        await anext(aiter(stream))


async def test_an_abort_frees_the_blocks_within_a_step(reached: Reached) -> None:
    stream = await reached.client.submit(request(n=2, max_tokens=3000))
    await anext(aiter(stream))
    await reached.hold()
    assert reached.used_blocks() > 0
    await stream.abort()
    await stream.abort()
    begun = reached.gate.entered
    reached.gate.open()
    await until_free(reached)
    assert reached.gate.entered == begun, "the step under way was the last"


async def test_an_id_is_free_again_after_its_abort(reached: Reached) -> None:
    old = await reached.client.submit(request("same", max_tokens=3000))
    await anext(aiter(old))
    await old.abort()
    new = await collect(await reached.client.submit(request("same", max_tokens=5)))
    assert len(new.token_ids[0]) == 5


async def test_a_cancelled_consumer_aborts_by_dropping_its_stream(reached: Reached) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in await reached.client.submit(request(max_tokens=3000)):
            started.set()

    consumer = asyncio.create_task(consume())
    await started.wait()
    consumer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await consumer
    del consumer
    gc.collect()
    await wait_until_async(lambda: reached.used_blocks() == 0, "the blocks come back")


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_submit_cancelled_at_any_point_leaves_nothing_behind(
    reached: Reached, turns: int
) -> None:
    submitting = asyncio.create_task(reached.client.submit(request(max_tokens=3000)))
    for _ in range(turns):
        await asyncio.sleep(0)
    if turns == 8:
        await asyncio.sleep(0.002)
    submitting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await submitting).abort()
    del submitting
    gc.collect()
    await asyncio.sleep(0.05)
    await wait_until_async(lambda: reached.used_blocks() == 0, "no orphan runs on")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("prompt_token_ids", request(prompt=(1, VOCAB_SIZE))),
        ("prompt_token_ids", request(prompt=(1,) * 4096)),
        ("max_tokens", request(max_tokens=4096)),
        ("stop_token_ids", request(stop_token_ids=[VOCAB_SIZE])),
        ("logit_bias", request(logit_bias={VOCAB_SIZE: 1.0})),
    ],
)
async def test_a_bad_request_is_refused_by_field_and_the_next_one_runs(
    reached: Reached, field: str, bad: EngineRequest
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await reached.client.submit(bad)
    assert caught.value.field == field
    assert len((await collect(await reached.client.submit(request()))).token_ids[0]) == 32


async def test_an_adapter_is_refused(reached: Reached) -> None:
    asked = EngineRequest("r", [1], request().sampling_params, adapter="a")
    with pytest.raises(FailedPreconditionError, match="not enabled"):
        await reached.client.submit(asked)


async def test_closing_aborts_what_lives(reached: Reached) -> None:
    streams = [await reached.client.submit(request(f"r{i}", max_tokens=3000)) for i in range(3)]
    waiting = asyncio.create_task(collect(streams[0]))
    await asyncio.sleep(0.02)
    await reached.client.close()
    with contextlib.suppress(UnavailableError):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(UnavailableError):
        await reached.client.submit(request())
    if isinstance(reached.client, RemoteEngineClient):
        await wait_until_async(lambda: reached.used_blocks() == 0, "the blocks come back")


async def test_closing_ends_the_session_at_once(engine: FakeEngine) -> None:
    table = engine.server._streams.sessions
    before = len(table)
    client = RemoteEngineClient(engine.target)
    await client.start()
    await client.submit(request(max_tokens=4000))
    assert len(table) == before + 1
    await client.close()
    assert len(table) == before
    await wait_until_async(lambda: engine.built.engine.stats().num_running == 0, "it ends")


async def test_closing_without_an_engine_waits_for_nobody() -> None:
    with FakeEngine(step_time_s=STEP_TIME_S) as engine:
        client = RemoteEngineClient(engine.target)
        await client.start()
    # Not for the window of 120 s.
    await asyncio.wait_for(client.close(), 30)


async def test_an_engine_in_this_process_that_dies_fails_what_lives() -> None:
    def die(plan: StepPlan) -> None:
        if plan.step == 3:
            raise UnavailableError("the worker is gone")

    client = InProcessEngineClient(
        fake_config(),
        build=lambda config, report: build_fake_engine(config, report, on_execute=die),
    )
    await client.start()
    stream = await client.submit(request("r", max_tokens=100))
    with pytest.raises(UnavailableError, match="its log has the details"):
        await asyncio.wait_for(collect(stream), 30)
    assert not client.ready
    with pytest.raises(UnavailableError):
        await client.submit(request("s"))
    await client.close()


async def test_a_second_live_request_of_one_id_is_refused(engine: FakeEngine) -> None:
    client = RemoteEngineClient(engine.target)
    await client.start()
    first = await client.submit(request("double", max_tokens=3000))
    with pytest.raises(AlreadyExistsError):
        await client.submit(request("double"))
    await first.abort()
    await client.close()


async def test_64_requests_at_once_do_not_mix(reached: Reached) -> None:
    async def run(number: int) -> list[int]:
        stream = await reached.client.submit(request(f"r{number}", (number + 1,), max_tokens=30))
        return (await collect(stream)).token_ids[0]

    together = await asyncio.gather(*(run(number) for number in range(64)))
    for number in (0, 17, 63):
        assert await run(number) == together[number]


async def test_a_consumer_that_does_not_read_holds_up_nobody(reached: Reached) -> None:
    idle = await reached.client.submit(request("idle", max_tokens=500))
    busy = await collect(await reached.client.submit(request("busy", max_tokens=200)))
    assert len(busy.token_ids[0]) == 200
    late = await collect(idle)
    assert len(late.token_ids[0]) == 500
    # What waited came in few, long turns.
    assert late.turns < 400


async def test_the_engine_forgets_every_stream_that_has_ended(engine: FakeEngine) -> None:
    client = RemoteEngineClient(engine.target)
    await client.start()

    async def run(number: int) -> None:
        stream = await client.submit(request(f"r{number}", n=2, max_tokens=20 + number))
        if number % 3 == 0:
            await stream.abort()
        elif number % 3 == 1:
            await stream.finish_sequence(0)
        async for _ in stream:
            pass

    await asyncio.gather(*(run(number) for number in range(30)))
    table = engine.server._streams.sessions
    # Sessions of earlier clients may keep some until they time out; this one is the newest.
    session = list(table.all())[-1]
    await wait_until_async(
        lambda: not any(stream.session is session for stream in table._routes.values()),
        "no request is routed any more",
    )
    await wait_until_async(
        lambda: not session.streams and not session._owner and not session._pending,
        "nothing is retained once it is acknowledged",
    )
    await client.close()


async def test_a_start_without_an_engine_fails_after_the_window() -> None:
    client = RemoteEngineClient("127.0.0.1:1", failover_window_s=0.5)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await client.start()
    assert not client.ready


async def test_a_proxy_in_the_environment_is_not_used(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    client = RemoteEngineClient(engine.target, failover_window_s=30)
    await client.start()
    await client.close()


def test_the_remote_client_imports_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys, pagewire_frontend.engine_client.remote\n"
        "bad = {'torch', 'transformers', 'gradio', 'pagewire_engine'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent)
