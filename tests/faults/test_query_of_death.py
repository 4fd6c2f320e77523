"""A request that kills the engine each time it is computed fails alone."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.fakes.real_processes import RealEngine, RealFrontend
from tests.faults.conftest import TinyModel
from tests.faults.mixed_streams import MixedStreams

POISON = "~"  # no prompt has it
POISON_TOKEN = 93  # of the tiny models' tokenizer
LIMIT_S = 300.0
DEATHS = 3  # twice among others, and once alone


@pytest.mark.parametrize(
    "computed", [0, pytest.param(30, marks=pytest.mark.slow)], ids=["its prompt", "its 30th token"]
)
async def test_it_fails_alone_and_the_31_others_finish(tiny: TinyModel, computed: int) -> None:
    """Whether it kills at its prompt, or when it has told something already."""
    deadly, *others = tiny.cases
    cases = [*others, dataclasses.replace(deadly, prompt=f"Tell me {POISON}")]
    with (
        RealEngine(*tiny.flags, step_s=0.02, poison=f"{POISON_TOKEN}:{computed}") as engine,
        RealFrontend(engine.target) as frontend,
    ):
        streams = MixedStreams(cases, frontend.http, frontend.grpc)
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
    poisoned = answers.pop(deadly.name)
    assert poisoned.error.startswith("INTERNAL: the engine died of this request each time")
    assert poisoned.num_tokens in range(max(0, computed - 2), computed + 1)
    assert len(answers) == 31
    for name, answer in answers.items():
        answer.assert_equals(tiny.expected[name], name)
        assert answer.resumptions <= DEATHS, name
    assert deaths == DEATHS
