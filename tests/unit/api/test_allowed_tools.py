"""A tool_choice that allows some of the tools: only those are called, on every way in."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.v1 import inference_pb2
from pagewire_frontend.tool_choice import constraint_for, tool_use
from pagewire_frontend.tool_parsers import TOOL_PARSERS
from tests.fakes.calling_model import replying
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
    sse_events,
)

NAMES = ("find", "read", "erase")
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in NAMES
]
RESPONSES_TOOLS = [{"type": "function", "name": name} for name in NAMES]
ERASE = '<tool_call>\n{"name": "erase", "arguments": {"all": true}}\n</tool_call>'
READ = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
MODES = inference_pb2.ToolChoice


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def in_responses(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


async def post(client: FakeEngineClient, path: str = "/v1/chat/completions", **body: Any) -> Any:
    async with http_client(await make_serving(client)) as http:
        return await http.post(path, json=body)


async def chat(client: FakeEngineClient, choice: Any, **body: Any) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    return await post(client, messages=messages, tools=TOOLS, tool_choice=choice, **body)


def callable_by(client: FakeEngineClient) -> list[str]:
    """The names that the constraint of the last request leaves."""
    constraint = client.requests[-1].sampling_params.structured_output
    assert constraint is not None
    assert constraint.json_schema is not None
    calls = json.loads(constraint.json_schema)["items"]["anyOf"]
    return [call["properties"]["name"]["const"] for call in calls]


def prompt_length(*names: str) -> int:
    return len("".join(f"{name}," for name in names) + "Hi")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_another_tool_is_text(stream: bool) -> None:
    response = await chat(replying(READ + ERASE), allowed("auto", "find", "read"), stream=stream)
    assert response.status_code == 200, response.text
    if stream:
        deltas = [event["choices"][0]["delta"] for event in sse_events(response.text)[:-1]]
        calls = [c["function"] for d in deltas for c in d.get("tool_calls", ()) if "id" in c]
        content = "".join(delta.get("content") or "" for delta in deltas)
    else:
        message = response.json()["choices"][0]["message"]
        calls = [call["function"] for call in message["tool_calls"]]
        content = message["content"]
    assert [call["name"] for call in calls] == ["read"]
    # After a call, a tag that ends one is no content.
    assert content == ERASE.removesuffix("\n</tool_call>")


async def test_without_a_list_a_call_of_an_unknown_tool_stands() -> None:
    response = await chat(replying(ERASE.replace("erase", "other")), "auto")
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "other"


async def test_a_free_model_is_shown_what_it_may_call() -> None:
    client = replying(READ)
    await chat(client, allowed("auto", "read"))
    assert len(client.requests[-1].prompt_token_ids) == prompt_length("read")
    assert client.requests[-1].sampling_params.structured_output is None


async def test_required_leaves_the_allowed_ones_and_keeps_the_prompt() -> None:
    client = replying('[{"name": "read", "parameters": {}}]')
    response = await chat(client, allowed("required", "read", "find", "read"))
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "read"
    assert callable_by(client) == ["find", "read"]
    assert len(client.requests[-1].prompt_token_ids) == prompt_length(*NAMES)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_responses_have_their_own_shape(mode: str) -> None:
    client = replying('[{"name": "read", "parameters": {}}]' if mode == "required" else READ)
    choice = in_responses(mode, "read")
    response = await post(
        client, "/v1/responses", input="Hi", tools=RESPONSES_TOOLS, tool_choice=choice
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["tool_choice"] == choice
    assert [item["name"] for item in answer["output"]] == ["read"]
    shown = NAMES if mode == "required" else ("read",)
    assert len(client.requests[-1].prompt_token_ids) == prompt_length(*shown)
    if mode == "required":
        assert callable_by(client) == ["read"]


A_TOOL = {"type": "function", "function": {"name": "read"}}


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"mode": "auto", "tools": [A_TOOL, {"type": "function", "function": {"name": "x"}}]},
         ".tools[1].function.name"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": ""}}]},
         ".tools[0].function.name"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": 7}}]},
         ".tools[0].function.name"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "read"}]},
         ".tools[0].function.name"),
        ({"mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}, ".tools[0].type"),
        ({"mode": "auto", "tools": ["read"]}, ".tools[0].type"),
        ({"mode": "auto", "tools": []}, ".tools"),
        ({"mode": "auto"}, ".tools"),
        ({"mode": "auto", "tools": [A_TOOL] * 1001}, ".tools"),
        ({"mode": "none", "tools": [A_TOOL]}, ".mode"),
        ({"mode": ["auto"], "tools": [A_TOOL]}, ".mode"),
        ({"tools": [A_TOOL]}, ".mode"),
        ("read", ""),
        (None, ""),
    ],
)  # fmt: skip
async def test_what_is_wrong_in_a_list_is_named(given: Any, where: str) -> None:
    response = await chat(replying(READ), {"type": "allowed_tools", "allowed_tools": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"tool_choice.allowed_tools{where}"


@pytest.mark.parametrize(
    ("choice", "where"),
    [
        (in_responses("auto", "read", "x"), "tool_choice.tools[1].name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["read"]}, "tool_choice.tools[0].type"),
        ({"type": "allowed_tools", "mode": "auto", "tools": {}}, "tool_choice.tools"),
        ({"type": "allowed_tools", "tools": [RESPONSES_TOOLS[0]]}, "tool_choice.mode"),
        (allowed("auto", "read"), "tool_choice.mode"),
    ],
)
async def test_responses_name_it_as_it_was_sent(choice: Any, where: str) -> None:
    body = {"input": "Hi", "tools": RESPONSES_TOOLS, "tool_choice": choice}
    response = await post(replying(READ), "/v1/responses", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == where


def grpc_request(**choice: Any) -> inference_pb2.ChatRequest:
    return chat_request("Hi", tools=[{"name": name} for name in NAMES], tool_choice=choice)


@pytest.mark.parametrize("mode", [{}, {"mode": MODES.MODE_AUTO}])
async def test_grpc_allows_some_too(mode: dict[str, Any]) -> None:
    client = replying(READ + ERASE)
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        (choice,) = (await stub.ChatUnary(grpc_request(allowed_names=["read"], **mode))).choices
    assert [call.name for call in choice.tool_calls] == ["read"]
    assert choice.content == ERASE.removesuffix("\n</tool_call>")
    assert len(client.requests[-1].prompt_token_ids) == prompt_length("read")


async def test_grpc_requires_one_of_some_too() -> None:
    client = replying('[{"name": "read", "parameters": {}}]')
    request = grpc_request(mode=MODES.MODE_REQUIRED, allowed_names=["read", "find"])
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        (choice,) = (await stub.ChatUnary(request)).choices
    assert [call.name for call in choice.tool_calls] == ["read"]
    assert callable_by(client) == ["find", "read"]


@pytest.mark.parametrize(
    ("choice", "where"),
    [
        ({"allowed_names": ["read", "x"]}, "tool_choice.allowed_names[1]"),
        ({"allowed_names": ["read"], "name": "read"}, "tool_choice.allowed_names"),
        ({"allowed_names": ["read"], "mode": MODES.MODE_NONE}, "tool_choice.allowed_names"),
        ({"allowed_names": ["read"] * 1001}, "tool_choice.allowed_names"),
    ],
)
async def test_grpc_names_what_is_wrong(choice: dict[str, Any], where: str) -> None:
    async with running_frontend(replying(READ)) as server, grpc_stub(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ChatUnary(grpc_request(**choice))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (raised.value.details() or "").startswith(f"{where}: ")


def test_without_tools_none_is_allowed() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        tool_use(None, allowed("auto", "read"))
    assert raised.value.field == "tool_choice.allowed_tools.tools[0].function.name"


def test_one_call_at_most_may_be_required_of_some() -> None:
    constraint = constraint_for(
        tool_use(TOOLS, allowed("required", "read"), parallel_tool_calls=False)
    )
    assert constraint is not None
    assert json.loads(constraint.json_schema or "")["maxItems"] == 1


CALLS_OF_ERASE = {
    "deepseek": "<｜tool▁call▁begin｜>erase<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "firefunction": 'functools[{"name": "erase", "arguments": {}}]',
    "functionary": "<function=erase>{}</function>",
    "glm45": "<tool_call>erase\n</tool_call>",
    "hermes": '<tool_call>{"arguments": {}, "name": "erase"}</tool_call>',
    "llama3_json": '{"name": "erase", "parameters": {}}',
    "mistral": "[TOOL_CALLS]erase[ARGS]{}",
    "pythonic": "[erase()]",
    "qwen3_coder": "<tool_call>\n<function=erase>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call><function=erase></function></seed:tool_call>",
}


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_no_format_calls_another_tool(name: str) -> None:
    text = CALLS_OF_ERASE[name]
    told: list[Any] = []
    for tools in (TOOLS, TOOLS[:2]):
        parser = TOOL_PARSERS[name](tools, only_these=True)
        content, calls = "", []
        for step in (*map(parser.feed, text), parser.finish()):
            content += step[0]
            calls += [call.name for call in step[1] if call.name]
        told.append((content, calls))
    assert told == [("", ["erase"]), (text, [])]
