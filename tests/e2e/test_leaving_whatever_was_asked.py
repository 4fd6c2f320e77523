"""A client that leaves, whatever it asked for: nothing of it goes on, and its id is free again."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.config import EngineConfig
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.step import StepPlan
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from pagewire_frontend.server import FrontendServer
from tests.e2e.wire_peer import wait_until_async
from tests.fakes.frontend import running_frontend
from tests.fakes.tiny_models import write_tiny_model

TEMPLATE = "{{ messages[0].content }}<think>{# <tool_call> </think> #}"
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
LONG = {"max_tokens": 100, "min_tokens": 100}
KINDS: dict[str, dict[str, Any]] = {
    "several prompts": {"prompt": ["a", "b c", "d"], **LONG},
    "beams": {
        "prompt": "a",
        "use_beam_search": True,
        "best_of": 3,
        "max_tokens": 100,
        "ignore_eos": True,
    },
    "best of": {"prompt": "a", "n": 1, "best_of": 3, **LONG},
    "prompt's log probabilities": {"prompt": "a b c d e", "prompt_logprobs": 1, "n": 2, **LONG},
    "a format": {"response_format": FORMAT, "n": 3, **LONG},
    "a call": {"tools": [TOOL], "tool_choice": "required", **LONG},
    "bounded reasoning": {"thinking_token_budget": 5, "n": 2, **LONG},
}
# As many of its steps are computed before the client leaves, or it waits in the queue.
WHEN = {"waiting": 0, "at first": 1, "later": 12}


class Served:
    """A frontend with a tiny model, of which one request's sequences fill the batch.

    Attributes:
        step_s: how long a step takes at least: what is left must not end before it is left.
    """

    step_s = 0.0

    def __init__(self, server: FrontendServer, client: InProcessEngineClient) -> None:
        url = f"http://127.0.0.1:{server.http_port}"
        self.http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self.stats = client.engine_loop.stats

    async def ask(self, body: dict[str, Any], request_id: str) -> httpx.Response:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        defaults = {"max_tokens": 60, "messages": [{"role": "user", "content": "x"}]}
        headers = {"x-request-id": request_id}
        return await self.http.post(path, json={**defaults, **body}, headers=headers)

    def at_rest(self) -> bool:
        now = self.stats()
        queued = now.num_running + now.num_waiting + now.num_swapped
        return not queued and now.num_free_blocks + now.num_cached_blocks == now.num_blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama-llama3-rope-tied")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    launch = SingleProcessExecutor.launch

    def slowly(self: SingleProcessExecutor, plan: StepPlan) -> PendingStep:
        time.sleep(Served.step_s)
        return launch(self, plan)

    monkeypatch.setattr(SingleProcessExecutor, "launch", slowly)
    monkeypatch.setattr(Served, "step_s", 0.0)
    config = EngineConfig(
        model=str(folder),
        served_model_name="tiny",
        device="cpu",
        dtype="float32",
        block_size=4,
        num_gpu_blocks_override=96,
        num_threads=1,
        max_num_seqs=3,
    )
    client = InProcessEngineClient(config)
    async with running_frontend(client, tool_call_parser="hermes") as server:  # type: ignore[arg-type]  # any client
        served = Served(server, client)
        yield served
        await served.http.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_left_of_it(served: Served, kind: str) -> None:
    body = KINDS[kind]
    short = {**body, "max_tokens": 4, "min_tokens": 0}
    # So that its constraint is known: it is to wait in the queue, and not for that.
    assert (await served.ask(short, "first")).status_code == 200
    for when, num_steps in WHEN.items():
        others = []
        Served.step_s = 0.015 if when == "waiting" else 0.03
        tokens = served.stats().num_generation_tokens
        if when == "waiting":
            others = [asyncio.create_task(served.ask({"prompt": "o", "n": 3, **LONG}, "other"))]
            await wait_until_async(lambda: served.stats().num_running > 0, "another runs")
        asked = asyncio.create_task(served.ask({**body, "stream": kind == "a call"}, "same"))
        first = served.stats().step

        def is_there(wanted: int = first + num_steps, waits: bool = when == "waiting") -> bool:
            now = served.stats()
            return now.num_waiting > 0 if waits else now.num_running > 0 and now.step > wanted

        await wait_until_async(is_there, f"it is {when}")
        left_at = served.stats().step
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        for other in others:
            assert (await other).status_code == 200
        await wait_until_async(served.at_rest, f"nothing is left of what was left {when}")
        if others:
            assert served.stats().num_generation_tokens - tokens == 3 * LONG["max_tokens"]
        else:
            assert served.stats().step - left_at < LONG["max_tokens"] - 2 * num_steps
        Served.step_s = 0.0
        again = await served.ask(short, "same")
        assert again.status_code == 200, again.text
    figures = (await served.http.get("/metrics")).text
    gauges = re.findall(r"^pagewire_num_requests_\w+{.*} (\S+)$", figures, re.M)
    assert set(gauges) == {"0.0"}
