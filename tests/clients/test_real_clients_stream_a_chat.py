"""The clients that people use, against the real model through both real wires. Greedy, SmolLM2
knows the capital of France."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.clients.conftest import NODE_CLIENT, RunningServer

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def openai_client(smollm2_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=smollm2_server.base_url, api_key="none", max_retries=0)


def test_the_openai_client_gets_a_whole_answer(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_completion_tokens=32
    )
    assert "Paris" in str(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_openai_client_streams(openai_client: openai.OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "Paris" in "".join(delta.content or "" for delta in deltas)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


async def test_the_openai_async_client_streams_completions(smollm2_server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=smollm2_server.base_url, api_key="none") as client:
        stream = await client.completions.create(
            model="smollm2",
            prompt="The capital of France is",
            temperature=0,
            max_tokens=8,
            logprobs=2,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
    assert "Paris" in "".join(chunk.choices[0].text for chunk in chunks)
    tokens = [
        t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens or []
    ]
    assert len(tokens) == 8
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_openai_client_reads_chat_logprobs(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for position in logprobs.content:
        assert position.token == position.top_logprobs[0].token  # greedy takes the likeliest
        assert position.logprob == pytest.approx(position.top_logprobs[0].logprob)
        assert bytes(position.bytes or []).decode() == position.token


CITIES = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find_capital",
            "strict": True,
            "parameters": {**CITIES, "required": ["city"], "additionalProperties": False},
        },
    }
]


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "find_capital"}}]
)
def test_the_openai_client_streams_a_call_that_it_demands(
    openai_client: openai.OpenAI, tool_choice: Any
) -> None:
    with openai_client.chat.completions.stream(
        model="smollm2",
        messages=MESSAGES,
        temperature=0,
        max_tokens=96,
        tools=TOOLS,
        tool_choice=tool_choice,
        parallel_tool_calls=False,
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.function.name == "find_capital"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")


def test_the_openai_client_raises_its_own_errors(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        openai_client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert [model.id for model in openai_client.models.list()] == ["smollm2"]


def test_curl_streams(smollm2_server: RunningServer, require_command: Callable[[str], str]) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 32, "stream": True}
    output = subprocess.run(
        [
            require_command("curl"),
            "--no-buffer",
            "--silent",
            "--show-error",
            "--fail",
            "--noproxy",
            "*",
            f"{smollm2_server.base_url}/chat/completions",
            "--header",
            "Content-Type: application/json",
            "--data",
            json.dumps(body),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    *events, done = [line.removeprefix("data: ") for line in output.split("\n") if line]
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "Paris" in "".join(delta.get("content", "") for delta in deltas)


def chat_request() -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(
        messages=[
            inference_pb2.ChatMessage(
                role="user", content=[inference_pb2.ContentPart(text=QUESTION)]
            )
        ],
        sampling_params=sampling_pb2.SamplingParams(temperature=0, max_tokens=32),
    )


def test_a_python_grpc_client_streams(smollm2_server: RunningServer) -> None:
    with grpc.insecure_channel(f"localhost:{smollm2_server.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        parts = list(stub.Chat(chat_request()))
        whole = stub.ChatUnary(chat_request())
    text = "".join(choice.content for part in parts for choice in part.choices)
    assert "Paris" in text
    assert whole.choices[0].content == text
    assert parts[-1].choices[0].finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert whole.usage.completion_tokens == parts[-1].usage.completion_tokens


def node_chat(
    server: RunningServer, modules: Path, request: dict[str, Any]
) -> list[dict[str, Any]]:
    """The lines that the Node client prints, connecting to `localhost`."""
    target = f"localhost:{server.grpc_port}"
    output = subprocess.run(
        ["node", str(NODE_CLIENT / "chat.js"), target, str(ROOT / "protos"), json.dumps(request)],
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_a_node_client_streams(smollm2_server: RunningServer, node_modules: Path) -> None:
    lines = node_chat(
        smollm2_server,
        node_modules,
        {
            "messages": [{"role": "user", "content": [{"text": QUESTION}]}],
            "samplingParams": {"temperature": 0, "maxTokens": 32},
        },
    )
    choices = [choice for line in lines for choice in line["choices"]]
    assert "Paris" in "".join(choice.get("content", "") for choice in choices)
    assert sum(len(choice["tokenIds"]) for choice in choices) > 3
    assert choices[-1]["finishReason"] == "FINISH_REASON_STOP"
    # uint32 on the wire: numbers in JavaScript, not strings.
    assert all(isinstance(i, int) for choice in choices for i in choice["tokenIds"])


def test_a_node_client_reads_errors(smollm2_server: RunningServer, node_modules: Path) -> None:
    lines = node_chat(smollm2_server, node_modules, {"messages": []})
    assert lines == [
        {"code": "INVALID_ARGUMENT", "details": lines[0]["details"]},
    ]
    assert lines[0]["details"].startswith("messages: ")


def test_the_openai_client_creates_and_streams_responses(openai_client: openai.OpenAI) -> None:
    whole = openai_client.responses.create(
        model="smollm2", input=QUESTION, temperature=0, max_output_tokens=32
    )
    assert "Paris" in whole.output_text
    with openai_client.responses.stream(
        model="smollm2", input=QUESTION, temperature=0, max_output_tokens=32
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert streamed.output_text == whole.output_text
    assert whole.usage is not None
    assert whole.usage == streamed.usage or whole.usage.input_tokens_details.cached_tokens == 0
