"""A request whose reasoning is ended for it goes on with its adapter, whatever becomes of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.finished import FinishedGeneration
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.tool_choice import ToolUse
from tests.e2e.wire_peer import wait_until_async
from tests.fakes.fake_adapters import write_fake_adapter
from tests.fakes.fake_engine import VOCAB_SIZE, FakeEngine, fake_config
from tests.fakes.fake_engine_client import byte_tokenizer, tokenizer_files
from tests.fakes.step_gate import StepGate

BUDGET, MAX_TOKENS = 12, 60
TEMPLATE = "{{ messages[0].content }}<think>\n{# </think> #}"


class Reasoning:
    """A frontend's path to an engine that never ends its reasoning, with an adapter "a"."""

    def __init__(self, engine: FakeEngine, generation: Generation, gate: StepGate) -> None:
        self.engine = engine
        self.generation = generation
        self.gate = gate

    async def load(self, path: str) -> None:
        request = engine_pb2.LoadAdapterRequest(name="a", path=path, in_place=True)
        await self.generation.client.load_adapter(request)

    async def answer(self) -> FinishedGeneration:
        rendered = self.generation.render_chat([{"role": "user", "content": "x"}])
        request = GenerationRequest(
            model="a",
            prompt_token_ids=rendered.token_ids,
            sampling_params=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=3),
            answer=self.generation.answer_format(rendered, ToolUse(), thinking_token_budget=BUDGET),
        )
        return await (await self.generation.start(request)).collect()

    async def begin(self) -> asyncio.Task[FinishedGeneration]:
        """An answer that is held within its reasoning."""
        self.gate.shut()
        answering = asyncio.create_task(self.answer())
        await wait_until_async(lambda: self.gate.waiting, "it runs")
        return answering


@pytest.fixture
async def reasoning(tmp_path: Path) -> AsyncIterator[Reasoning]:
    gate = StepGate()
    files = tokenizer_files(TEMPLATE, byte_tokenizer(num_words=VOCAB_SIZE - 256 - 3))
    for name in ("old", "new"):
        write_fake_adapter(tmp_path / name, name)
    config = fake_config(enable_lora=True, lora_dir=str(tmp_path))
    # Slow enough not to come to its end while it is handed over again.
    knobs = {"step_time_s": 0.03, "tokenizer_files": files, "on_execute": gate}
    with FakeEngine(config, **knobs) as engine:
        client = RemoteEngineClient(engine.target)
        await client.start()
        generation = await Generation.create(client, GenerationSettings())
        reasoning = Reasoning(engine, generation, gate)
        await reasoning.load("old")
        await generation.adapters.refresh()
        yield reasoning
        gate.open()
        await client.close()


@pytest.mark.parametrize("change", ["replaced", "unloaded"])
async def test_what_becomes_of_the_adapter_meanwhile_changes_nothing(
    reasoning: Reasoning, change: str
) -> None:
    whole = await reasoning.answer()
    assert len(whole.sequences[0].token_ids) == MAX_TOKENS
    answering = await reasoning.begin()
    if change == "replaced":
        await reasoning.load("new")
        changing = None
    else:
        request = engine_pb2.UnloadAdapterRequest(name="a")
        changing = asyncio.create_task(reasoning.generation.client.unload_adapter(request))
        roster = reasoning.engine.built.adapters
        assert roster is not None
        (adapter,) = roster.adapters()
        await wait_until_async(lambda: adapter.is_leaving, "it is being unloaded")
    reasoning.gate.open()
    assert (await answering).sequences == whole.sequences
    if changing is not None:
        await changing


async def test_it_goes_on_with_the_version_that_it_began_with(reasoning: Reasoning) -> None:
    # Another frontend has replaced it; this one hears of it as it starts the request.
    await reasoning.load("new")
    assert len((await reasoning.answer()).sequences[0].token_ids) == MAX_TOKENS
