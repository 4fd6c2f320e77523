"""OpenAI's own clients, for Python and Node, on every route that they have and pagewire serves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.conftest import NODE_CLIENT, RunningServer

TEXTS = ["The cat sits outside", "Die Katze sitzt drau\u00dfen \U0001f408"]


def run_node(script: str, server: RunningServer, modules: Path, *arguments: str) -> Any:
    """What one of the scripts printed, which is JSON."""
    output = subprocess.run(
        ["node", str(NODE_CLIENT / script), server.base_url, "none", *arguments],
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout)


def python_client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def test_nodes_client_generates(smollm2_server: RunningServer, node_modules: Path) -> None:
    told = run_node("openai.mjs", smollm2_server, node_modules)
    assert told["model"] == "smollm2"
    for name in ("chat", "chatStream", "completion", "completionStream", "response"):
        assert "Paris" in told[name], name
    assert told["responseStream"] == told["response"]
    assert told["completionStream"] == told["completion"]
    for call in (told["call"], told["callWhole"], told["responseCall"]):
        assert call["name"] == "find_capital"
        assert call["arguments"]["city"] in ("Oslo", "Paris")
    assert told["parsed"]["city"] in ("Oslo", "Paris")
    assert told["logprobs"] == 8
    assert told["eventTypes"][-1] == "response.completed"
    assert told["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}


def test_nodes_client_reaches_stored_responses(
    smollm2_server: RunningServer, node_modules: Path
) -> None:
    told = run_node("stored_responses.mjs", smollm2_server, node_modules)
    assert told["retrieved"] == told["created"]
    assert told["inputs"] == ["user"]
    assert told["next"]["previous"] == told["created"]["id"]
    assert told["gone"] == 404


def test_pythons_client_reaches_stored_responses(smollm2_server: RunningServer) -> None:
    responses = python_client(smollm2_server).responses
    created = responses.create(model="smollm2", input="Hi!", max_output_tokens=4, temperature=0)
    assert responses.retrieve(created.id).output_text == created.output_text
    assert [item.type for item in responses.input_items.list(created.id)] == ["message"]
    following = responses.create(
        model="smollm2",
        input="And now?",
        max_output_tokens=4,
        previous_response_id=created.id,
    )
    assert following.previous_response_id == created.id
    responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(created.id)


def test_pythons_client_generates_by_the_routes_of_old(smollm2_server: RunningServer) -> None:
    """Chats, streams and tools are in `test_real_clients_stream_a_chat`."""
    client = python_client(smollm2_server)
    assert client.models.retrieve("smollm2").id == "smollm2"
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = client.completions.create(model="smollm2", prompt=prompts, temperature=0, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Paris" in answer.choices[0].text
    assert "Rome" in answer.choices[1].text


def test_both_clients_get_the_same_embeddings(
    minilm_server: RunningServer, node_modules: Path
) -> None:
    """Equal to transformers' they are in `e2e/test_minilm_served`."""
    told = run_node("embeddings.mjs", minilm_server, node_modules, json.dumps(TEXTS))
    client = python_client(minilm_server)
    ours = client.embeddings.create(model="minilm", input=TEXTS)
    assert len(ours.data[0].embedding) == 384
    for packed, plain, expected in zip(told["packed"], told["plain"], ours.data, strict=True):
        assert packed == pytest.approx(expected.embedding, abs=1e-6)
        assert plain == pytest.approx(expected.embedding, abs=1e-6)
    assert told["usage"] == {
        "prompt_tokens": ours.usage.prompt_tokens,
        "total_tokens": ours.usage.total_tokens,
    }
    assert told["error"] == {"name": "BadRequestError", "status": 400, "param": "dimensions"}
