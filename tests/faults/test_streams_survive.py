"""Thirty-two streams of all kinds go on over an engine's death, and over a lost connection to it:
token for token and text for text as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.wire_peer import WirePeer, wait_until_async
from tests.fakes.real_processes import RealEngine, RealFrontend, RealServe
from tests.faults.conftest import NUM_BLOCKS, TinyModel
from tests.faults.mixed_streams import Answer, mixed_cases
from tests.faults.streams_in_the_middle import (
    EARLIEST,
    LATEST,
    CaughtStreams,
    catch_in_the_middle,
)

pytestmark = pytest.mark.slow

PIRATE = Path(__file__).resolve().parents[1] / "adapters" / "pirate"
STEP_S = 0.02
LIMIT_S = 240.0


def epoch_of(target: str) -> int:
    with WirePeer(target) as peer:
        return peer.stats().epoch


async def until_no_blocks_are_held(target: str) -> None:
    """Those of the last step come back after its tokens were told."""
    with WirePeer(target) as peer:
        await wait_until_async(lambda: peer.num_held_blocks() == 0, "the blocks come back")


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        async with asyncio.timeout(LIMIT_S):
            while (await client.get(f"{url}/health")).status_code != 200:  # noqa: ASYNC110  # a process
                await asyncio.sleep(0.1)


async def finish(caught: CaughtStreams) -> dict[str, Answer]:
    return await asyncio.wait_for(caught.answers, LIMIT_S)


def assert_undisturbed(answers: dict[str, Answer], tiny: TinyModel, *, resumptions: int) -> None:
    assert len(answers) == 32
    for name, answer in answers.items():
        answer.assert_equals(tiny.expected[name], name)
        assert answer.resumptions == resumptions, name


async def test_over_an_engine_that_was_killed_and_started_again(tiny: TinyModel) -> None:
    with RealEngine(*tiny.flags, step_s=STEP_S) as engine, RealFrontend(engine.target) as frontend:
        epoch = epoch_of(engine.target)
        caught = await catch_in_the_middle(
            tiny.cases, frontend.http, frontend.grpc, tiny.expected, engine.pid
        )
        engine.kill()
        await asyncio.to_thread(engine.start)
        assert epoch_of(engine.target) != epoch
        assert_undisturbed(await finish(caught), tiny, resumptions=1)
        await until_no_blocks_are_held(engine.target)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
async def test_over_an_engine_that_the_supervisor_starts_again(
    tiny: TinyModel, blow: signal.Signals
) -> None:
    # One that is killed is not to be taken for stuck on a busy machine.
    flags = (*tiny.flags, f"--engine-stall-timeout={8 if blow == signal.SIGSTOP else 60}")
    with RealServe(*flags, step_s=STEP_S) as serve:
        engine = serve.engine()
        caught = await catch_in_the_middle(
            tiny.cases, serve.http, serve.grpc, tiny.expected, engine.pid
        )
        if blow == signal.SIGKILL:
            engine.kill()
        # Else it stands still from here on, until the supervisor has had enough of it.
        assert_undisturbed(await finish(caught), tiny, resumptions=1)
        assert serve.engine().pid != engine.pid
        assert ("engine is stuck since" in serve.output) == (blow == signal.SIGSTOP)
        assert "engine is ready again after" in serve.output


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
async def test_over_a_delta_socket_that_was_cut(tiny: TinyModel, wire: str) -> None:
    flags = tiny.flags if wire == "ipc" else (*tiny.flags, "--stream-endpoint=tcp://127.0.0.1:*")
    with RealEngine(*flags, step_s=STEP_S) as engine, RealFrontend(engine.target) as frontend:
        epoch = epoch_of(engine.target)
        caught = await catch_in_the_middle(
            tiny.cases, frontend.http, frontend.grpc, tiny.expected, engine.pid
        )
        engine.signal(signal.SIGCONT)
        engine.cut()
        lost = "lost the engine at"
        await wait_until_async(lambda: lost in frontend.output, "the frontend notices")
        # The session lives, and with it all that was not acknowledged: nothing is computed again.
        assert_undisturbed(await finish(caught), tiny, resumptions=0)
        assert "the engine's session goes on" in frontend.output
        assert epoch_of(engine.target) == epoch
        await until_no_blocks_are_held(engine.target)


async def test_a_real_model_s_streams_over_an_engine_that_the_supervisor_starts_again(
    smollm2_path: Path,
) -> None:
    cases = mixed_cases(40, ("pirate", "pirate"))
    flags = (
        str(smollm2_path),
        "--dtype=float32",
        "--max-model-len=1024",
        "--num-gpu-blocks-override=512",
        "--enable-lora",
        f"--lora-modules=pirate={PIRATE}",
    )
    with RealServe(*flags) as serve:
        undisturbed = CaughtStreams(cases, serve.http, serve.grpc)
        expected = await asyncio.wait_for(undisturbed.answers, LIMIT_S)
        engine = serve.engine()
        caught = await catch_in_the_middle(cases, serve.http, serve.grpc, expected, engine.pid)
        engine.kill()
        answers = await finish(caught)
        for name, answer in answers.items():
            answer.assert_equals(expected[name], name)
            assert answer.resumptions == 1, name


async def test_past_the_timeout_each_stream_ends_unavailable_with_what_it_had(
    tiny: TinyModel,
) -> None:
    with (
        RealEngine(*tiny.flags, step_s=STEP_S) as engine,
        RealFrontend(engine.target, "--failover-timeout=2") as frontend,
    ):
        caught = await catch_in_the_middle(
            tiny.cases, frontend.http, frontend.grpc, tiny.expected, engine.pid
        )
        engine.kill()
        answers = await finish(caught)
        for name, answer in answers.items():
            assert answer.error.startswith(("UNAVAILABLE: ", "unavailable: ")), (name, answer.error)
            assert "could not be reached for 2 s" in answer.error
            assert not answer.endings, name
            wanted = tiny.expected[name]
            assert EARLIEST <= answer.num_tokens / wanted.num_tokens <= LATEST
            answer.assert_begins(wanted, name)
        # And the frontend is there for the next engine.
        await asyncio.to_thread(engine.start)
        await until_ready(frontend.http)
        again = CaughtStreams(tiny.cases, frontend.http, frontend.grpc)
        assert_undisturbed(await finish(again), tiny, resumptions=0)


async def test_nothing_is_lost_while_the_frontend_stands_still_for_ten_seconds(
    tiny: TinyModel,
) -> None:
    with RealEngine(*tiny.flags, step_s=STEP_S) as engine, RealFrontend(engine.target) as frontend:
        epoch = epoch_of(engine.target)
        caught = await catch_in_the_middle(
            tiny.cases, frontend.http, frontend.grpc, tiny.expected, engine.pid
        )
        frontend.signal(signal.SIGSTOP)
        engine.signal(signal.SIGCONT)
        await asyncio.sleep(10)
        frontend.signal(signal.SIGCONT)
        assert_undisturbed(await finish(caught), tiny, resumptions=0)
        assert epoch_of(engine.target) == epoch
        await until_no_blocks_are_held(engine.target)


async def test_the_blocks_of_a_dead_frontend_come_back_after_the_session_timeout(
    tiny: TinyModel,
) -> None:
    flags = (*tiny.flags, "--session-timeout=5")
    with RealEngine(*flags, step_s=STEP_S) as engine, WirePeer(engine.target) as peer:
        with RealFrontend(engine.target) as frontend:
            caught = await catch_in_the_middle(
                tiny.cases, frontend.http, frontend.grpc, tiny.expected, engine.pid
            )
            engine.signal(signal.SIGCONT)
            frontend.kill()
            held = await asyncio.to_thread(peer.num_held_blocks)
        # Its clients' connections are gone with it.
        with contextlib.suppress(Exception):
            await finish(caught)
        await wait_until_async(lambda: peer.stats().num_sessions == 0, "the session is buried")
        await wait_until_async(lambda: peer.num_held_blocks() == 0, "the blocks come back")
        stats = peer.stats()
        assert held > 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks == NUM_BLOCKS
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
