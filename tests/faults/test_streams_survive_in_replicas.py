"""Thirty-two streams of all kinds (text, tools, schemas, beams, adapters) over two real engines, of
which one dies, or both are restarted in turn: token for token as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from tests.e2e.wire_peer import wait_until_async
from tests.fakes.real_processes import RealEngine, RealFrontend
from tests.faults.conftest import TinyModel
from tests.faults.streams_in_the_middle import CaughtStreams, catch_in_the_middle

pytestmark = pytest.mark.slow

STEP_S = 0.02
LIMIT_S = 240.0


@contextlib.asynccontextmanager
async def stopped_in_the_middle(
    tiny: TinyModel,
) -> AsyncIterator[tuple[RealEngine, RealEngine, RealFrontend, CaughtStreams]]:
    """Two engines, which stand still, and their frontend, with all streams in the middle."""
    with (
        RealEngine(*tiny.flags, step_s=STEP_S) as one,
        RealEngine(*tiny.flags, step_s=STEP_S) as two,
        RealFrontend(f"{one.target},{two.target}") as frontend,
    ):
        caught = await catch_in_the_middle(
            tiny.cases, frontend.http, frontend.grpc, tiny.expected, one.pid, two.pid
        )
        yield one, two, frontend, caught


async def test_over_one_of_two_engines_that_was_killed(tiny: TinyModel) -> None:
    async with stopped_in_the_middle(tiny) as (one, two, _frontend, caught):
        two.signal(signal.SIGCONT)
        one.kill()
        # It stays dead.
        answers = await asyncio.wait_for(caught.answers, LIMIT_S)
        for name, answer in answers.items():
            answer.assert_equals(tiny.expected[name], name)
        moved = [name for name, answer in answers.items() if answer.resumptions]
        assert 4 <= len(moved) < 32, "some were in either engine"


async def test_over_one_of_two_engines_that_stands_still_and_comes_back(tiny: TinyModel) -> None:
    async with stopped_in_the_middle(tiny) as (one, two, frontend, caught):
        two.signal(signal.SIGCONT)
        answers = await asyncio.wait_for(caught.answers, LIMIT_S)
        for name, answer in answers.items():
            answer.assert_equals(tiny.expected[name], name)
        assert 4 <= sum(answer.resumptions > 0 for answer in answers.values()) < 32
        back = f"requests go to the engine at {one.target}"
        known = frontend.output.count(back)
        one.signal(signal.SIGCONT)
        await wait_until_async(
            lambda: frontend.output.count(back) > known, "it gets requests again", timeout_s=60
        )


async def test_over_a_rolling_restart_of_both_engines(tiny: TinyModel) -> None:
    async with stopped_in_the_middle(tiny) as (one, two, frontend, caught):
        one.signal(signal.SIGCONT)
        two.signal(signal.SIGCONT)
        for engine in (one, two):
            engine.signal(signal.SIGTERM)
            assert await asyncio.to_thread(engine.wait) == 0
            known = frontend.output.count(f"requests go to the engine at {engine.target}")
            await asyncio.to_thread(engine.start)
            await wait_until_async(
                lambda engine=engine, known=known: (
                    frontend.output.count(f"requests go to the engine at {engine.target}") > known
                ),
                "it gets requests again",
                timeout_s=120,
            )
        answers = await asyncio.wait_for(caught.answers, LIMIT_S)
        for name, answer in answers.items():
            answer.assert_equals(tiny.expected[name], name)
        assert sum(answer.resumptions for answer in answers.values()) >= 8
