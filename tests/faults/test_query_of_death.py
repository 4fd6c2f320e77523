"""A request that kills the engine each time it is computed fails alone."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.fakes.real_processes import RealEngine, RealFrontend, RealServe
from tests.faults.conftest import TinyModel
from tests.faults.mixed_streams import Answer, Case, MixedStreams

pytestmark = pytest.mark.slow

POISON = "~"  # no prompt has it
POISON_TOKEN = 93  # of the tiny models' tokenizer
LIMIT_S = 300.0
DEATHS = 3  # twice among others, and once alone


def with_a_deadly_one(tiny: TinyModel) -> list[Case]:
    """The mixed streams, the first of them deadly."""
    deadly, *others = tiny.cases
    return [*others, dataclasses.replace(deadly, prompt=f"Tell me {POISON}")]


def assert_one_failed(answers: dict[str, Answer], tiny: TinyModel, computed: int) -> None:
    """The deadly one after as many tokens as it may have told; the others are undisturbed."""
    poisoned = answers.pop(tiny.cases[0].name)
    assert poisoned.error.startswith("INTERNAL: the engine died of this request each time")
    # The last ones may have been on their way from the engine when it died.
    assert computed // 2 <= poisoned.num_tokens <= computed
    assert len(answers) == 31
    for name, answer in answers.items():
        answer.assert_equals(tiny.expected[name], name)
        assert answer.resumptions <= DEATHS, name


@pytest.mark.parametrize("computed", [0, 30], ids=["its prompt", "its 30th token"])
async def test_it_fails_alone_and_the_31_others_finish(tiny: TinyModel, computed: int) -> None:
    """Whether it kills at its prompt, or when it has told something already."""
    with (
        RealEngine(*tiny.flags, step_s=0.02, poison=f"{POISON_TOKEN}:{computed}") as engine,
        RealFrontend(engine.target) as frontend,
    ):
        streams = MixedStreams(with_a_deadly_one(tiny), frontend.http, frontend.grpc)
        running = asyncio.create_task(streams.run())
        deaths = 0
        while not running.done():
            died = asyncio.create_task(asyncio.to_thread(engine.wait, LIMIT_S))
            await asyncio.wait((died, running), return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                deaths += 1
                await asyncio.to_thread(engine.start)
            else:
                engine.kill()
        answers = running.result()
    assert_one_failed(answers, tiny, computed)
    assert deaths == DEATHS


async def test_one_that_makes_the_engine_hang_each_time_fails_alone(tiny: TinyModel) -> None:
    """The supervisor kills what makes no progress."""
    flags = (*tiny.flags, "--engine-stall-timeout=8")
    with RealServe(*flags, step_s=0.02, poison=f"{POISON_TOKEN}:0:hang") as serve:
        streams = MixedStreams(with_a_deadly_one(tiny), serve.http, serve.grpc)
        answers = await asyncio.wait_for(streams.run(), LIMIT_S)
        assert_one_failed(answers, tiny, 0)
        serve.engine()
        assert serve.output.count("engine is stuck since") == DEATHS
