"""A tool_choice that demands a call holds the answer to JSON, which comes back as calls."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from jsonschema import Draft202012Validator

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import FIELD, StructuredOutput
from pagewire_frontend.tool_choice import ToolUse, constraint_for, named_tool, tool_use
from pagewire_frontend.tool_parsers.forced import RequiredCallsParser
from pagewire_frontend.tool_parsers.xml_calls import Qwen3CoderParser
from tests.fakes.fake_engine_client import FakeEngineClient, ids_of
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
    sse_events,
)

CITY = {"$ref": "#/$defs/city"}
PARAMETERS = {
    "type": "object",
    "properties": {"location": CITY},
    "$defs": {"city": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"location": "Zürich"}'
REQUIRED_REPLY = (
    f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
)
OPENED = "{{ messages[0].content }}<think>{# </think> #}"


async def ask(client: FakeEngineClient, **body: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": "Weather?"}]
    body = {"messages": messages, "tools": TOOLS, **body}
    async with http_client(await make_serving(client)) as http:
        response = await http.post("/v1/chat/completions", json=body)
    if body.get("stream"):
        return response.status_code, sse_events(response.text)
    return response.status_code, response.json()


def replying(reply: str, **settings: Any) -> FakeEngineClient:
    return FakeEngineClient(reply=lambda request, index: reply, **settings)


def schema_of(constraint: StructuredOutput | None) -> Any:
    assert constraint is not None
    assert constraint.json_schema is not None
    return json.loads(constraint.json_schema)


def test_a_named_tool_demands_its_arguments() -> None:
    constraint = constraint_for(tool_use(TOOLS, NAMED))
    assert schema_of(constraint) == PARAMETERS
    assert constraint is not None
    assert constraint.lenient
    none = constraint_for(named_tool(tool_use(TOOLS), "now"))
    assert schema_of(none) == {"type": "object", "additionalProperties": False}
    assert none is not None
    assert not none.lenient


def test_required_demands_a_list_of_calls_of_any_tool() -> None:
    schema = schema_of(constraint_for(tool_use(TOOLS, "required")))
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    weather, now = schema["items"]["anyOf"]
    assert weather["properties"]["name"] == {"const": "get_weather"}
    assert now["required"] == ["name", "parameters"]
    single = constraint_for(tool_use(TOOLS, "required", parallel_tool_calls=False))
    assert schema_of(single)["maxItems"] == 1


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": INTEGER}},
        {"properties": {"a": {"$ref": "#/definitions/b"}}, "definitions": {"b": INTEGER}},
        {"properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": {"b/c": INTEGER}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": INTEGER}},
        {"properties": {"a": {"$ref": "#/$defs/b/items"}}, "$defs": {"b": {"items": INTEGER}}},
        {"properties": {"a": INTEGER, "b": {"$ref": "#"}}},
        {"properties": {"a": {"$ref": "#b"}}, "$defs": {"b": {"$anchor": "b", **INTEGER}}},
        {"$id": "x:y", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": INTEGER}},
        {"properties": {"a": INTEGER, "$ref": {"const": {"$ref": "#/$defs/b"}}}},
    ],
)
def test_a_tools_references_mean_the_same_in_a_list_of_calls(parameters: dict[str, Any]) -> None:
    parameters = {"type": "object", "required": ["a"], **parameters}
    others = {"type": "object", "$defs": {"b": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("other", others), ("f", parameters))
    ]
    calls = Draft202012Validator(schema_of(constraint_for(tool_use(tools, "required"))))
    alone = Draft202012Validator(parameters)
    for arguments in (
        {"a": 1},
        {"a": "x"},
        {"a": 1, "b": {"a": 1}},
        {"a": 1, "b": []},
        {"a": 1, "$ref": {"$ref": "#/$defs/b"}},
    ):
        call = [{"name": "f", "parameters": arguments}]
        assert calls.is_valid(call) == alone.is_valid(arguments)


@pytest.mark.parametrize("definitions", [[1], "x", None, {"a": 1}])
def test_definitions_that_are_none_are_left_to_the_schemas_compiler(definitions: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "$defs": definitions}}
    assert constraint_for(tool_use([{"type": "function", "function": function}], "required"))


async def test_schemas_nested_too_deep_are_refused_and_hurt_no_free_answer() -> None:
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {"anyOf": [nested]}
    parameters = {"type": "object", "properties": {"a": nested}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidArgumentError) as raised:
        constraint_for(tool_use(tools, "required"))
    assert raised.value.field == "tools"
    parser = Qwen3CoderParser(tools)
    _, calls = parser.feed("<function=f><parameter=a>1</parameter></function>")
    assert calls[0].arguments == '{"a": 1}'


@pytest.mark.parametrize("use", [ToolUse(), tool_use(TOOLS), tool_use(TOOLS, "none")])
def test_other_choices_leave_the_model_free(use: ToolUse) -> None:
    assert constraint_for(use) is None


@pytest.mark.parametrize(
    ("choice", "reply", "calls"),
    [
        (NAMED, ARGUMENTS, [("get_weather", ARGUMENTS)]),
        ("required", REQUIRED_REPLY, [("get_weather", ARGUMENTS), ("now", "{}")]),
    ],
)
async def test_the_answer_comes_back_as_calls(
    choice: Any, reply: str, calls: list[tuple[str, str]]
) -> None:
    client = replying(reply)  # of a model that has no format of its own
    status, body = await ask(client, tool_choice=choice)
    assert status == 200
    (answer,) = body["choices"]
    functions = [call["function"] for call in answer["message"]["tool_calls"]]
    assert [(function["name"], function["arguments"]) for function in functions] == calls
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == "tool_calls"
    assert client.requests[0].sampling_params.structured_output is not None
    _, events = await ask(client, tool_choice=choice, stream=True)
    pieces = [
        call for event in events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [piece["function"]["name"] for piece in pieces if "id" in piece] == [c[0] for c in calls]


@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [
        ("cation", '{"lo', "stop"),
        ('"}', '{"location": "Zürich', "stop"),
        ("never", ARGUMENTS, "tool_calls"),
    ],
)
async def test_a_call_that_a_stop_string_cut_is_not_told_as_one_to_be_made(
    stop: str, arguments: str, reason: str
) -> None:
    for streamed in (False, True):
        _, body = await ask(replying(ARGUMENTS), tool_choice=NAMED, stop=stop, stream=streamed)
        if streamed:
            choices = [event["choices"][0] for event in body[:-1]]
            calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
            told = "".join(call["function"]["arguments"] for call in calls)
            answer = choices[-1]
        else:
            (answer,) = body["choices"]
            (call,) = answer["message"]["tool_calls"]
            told = call["function"]["arguments"]
        assert told == arguments
        assert answer["finish_reason"] == reason
        assert answer["stop_reason"] == (stop if reason == "stop" else None)


async def test_a_stop_string_behind_a_whole_call_leaves_it_one() -> None:
    client = replying(ARGUMENTS + " \n\n")
    _, body = await ask(client, tool_choice=NAMED, stop="\n\n")
    (answer,) = body["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["stop_reason"] == "\n\n"


async def test_grpc_demands_calls_too() -> None:
    client = replying(ARGUMENTS)
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        request = chat_request("W?", tools=[{"name": "f"}], tool_choice={"name": "f"})
        (choice,) = (await stub.ChatUnary(request)).choices
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("f", ARGUMENTS)]


async def test_a_forced_call_comes_without_reasoning() -> None:
    client = replying(ARGUMENTS, chat_template=OPENED)
    _, body = await ask(client, tool_choice=NAMED)
    assert body["choices"][0]["message"]["tool_calls"]
    assert client.requests[0].prompt_token_ids == ids_of("Weather?<think>\n</think>\n\n")


async def test_a_forced_call_takes_no_other_format() -> None:
    client = replying(ARGUMENTS, chat_template=OPENED)
    format_ = {"type": "json_object"}
    status, body = await ask(client, tool_choice="required", response_format=format_)
    assert (status, body["error"]["param"]) == (400, "tool_choice")


async def test_a_forced_calls_id_is_one_that_the_models_template_takes() -> None:
    client = replying(ARGUMENTS, chat_template="{# [TOOL_CALLS] #}{{ messages[0].content }}")
    _, body = await ask(client, tool_choice=NAMED)
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9


@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_a_call_and_another_format_exclude_each_other(choice: Any) -> None:
    client = replying(ARGUMENTS)
    serving = await make_serving(client)
    rendered = serving.generation.render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidArgumentError) as raised:
        serving.generation.answer_format(rendered, tool_use(TOOLS, choice), constrained=True)
    assert raised.value.field == "tool_choice"


def fits_of(client: FakeEngineClient) -> list[bool | None]:
    told = (request.sampling_params.structured_output for request in client.requests)
    return [constraint and constraint.fit_max_tokens for constraint in told]


@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_a_client_may_let_max_tokens_cut_a_demanded_call(choice: Any) -> None:
    client = replying(ARGUMENTS)
    for more in ({}, {"fit_max_tokens": False}, {"fit_max_tokens": True}):
        assert (await ask(client, tool_choice=choice, **more))[0] == 200
    assert fits_of(client) == [True, False, True]


async def test_responses_let_max_tokens_cut_too() -> None:
    client = replying(ARGUMENTS)
    named = {"type": "function", "name": "get_weather"}
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    text = {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS}}
    async with http_client(await make_serving(client)) as http:
        for asked in ({"tools": [tool], "tool_choice": named}, {"text": text}):
            for more in ({}, {"fit_max_tokens": False}):
                body = {"input": "Weather?", **asked, **more}
                assert (await http.post("/v1/responses", json=body)).status_code == 200
        free = await http.post("/v1/responses", json={"input": "x", "fit_max_tokens": False})
    assert fits_of(client) == [True, False, True, False]
    assert (free.status_code, free.json()["error"]["param"]) == (400, "fit_max_tokens")


async def test_grpc_lets_max_tokens_cut_a_demanded_call() -> None:
    client = replying(ARGUMENTS)
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        for more in ({}, {"fit_max_tokens": False}):
            choice = {"name": "f", **more}
            request = chat_request("W?", tools=[{"name": "f"}], tool_choice=choice)
            await stub.ChatUnary(request)
        free = chat_request("W?", tools=[{"name": "f"}], tool_choice={"fit_max_tokens": False})
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ChatUnary(free)
    assert fits_of(client) == [True, False]
    assert (raised.value.details() or "").startswith("tool_choice.fit_max_tokens: ")


async def test_of_calls_that_are_not_demanded_nothing_can_be_said() -> None:
    for choice in ("auto", "none", None):
        status, body = await ask(replying("x"), tool_choice=choice, fit_max_tokens=False)
        assert (status, body["error"]["param"]) == (400, "fit_max_tokens")


async def test_a_beam_search_can_not_be_made_to_call() -> None:
    status, body = await ask(replying(ARGUMENTS), tool_choice=NAMED, use_beam_search=True, n=2)
    assert (status, body["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("field", "param"), [("structured_output", "tool_choice"), (f"{FIELD}.json_schema", "tools")]
)
async def test_an_error_about_the_constraint_names_what_asked_for_it(
    field: str, param: str
) -> None:
    # It may come with the answer: that no text goes on is found out then.
    def failing() -> FakeEngineClient:
        return replying(ARGUMENTS, fail_after=1, failure=InvalidArgumentError(field, "no text"))

    status, body = await ask(failing(), tool_choice=NAMED)
    assert (status, body["error"]["param"]) == (400, param)
    async with running_frontend(failing()) as server, grpc_stub(server) as stub:
        request = chat_request("W?", tools=[{"name": "f"}], tool_choice={"name": "f"})
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ChatUnary(request)
    assert (raised.value.details() or "").startswith(f"{param}: ")


@pytest.mark.parametrize("length", range(len(REQUIRED_REPLY) + 1))
def test_a_list_that_is_cut_off_leaves_no_content_beside_its_calls(length: int) -> None:
    parser = RequiredCallsParser(TOOLS)
    content, calls = parser.feed(REQUIRED_REPLY[:length])
    last_content, last_calls = parser.finish()
    told = [call for call in calls + last_calls if call.name]
    assert content + last_content == ("" if told else REQUIRED_REPLY[:length])


def test_strict_is_a_word_of_its_own() -> None:
    function = {"name": "f", "strict": "yes"}
    with pytest.raises(InvalidArgumentError) as raised:
        tool_use([{"type": "function", "function": function}])
    assert raised.value.field == "tools[0].function.strict"


async def test_strict_tools_are_known_to_grpc() -> None:
    client = replying(ARGUMENTS)
    tools = [{"name": "loose"}, {"name": "strict", "strict": True}]
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        for name in ("loose", "strict"):
            await stub.ChatUnary(chat_request("W?", tools=tools, tool_choice={"name": name}))
    constraints = [request.sampling_params.structured_output for request in client.requests]
    assert [each is not None and each.lenient for each in constraints] == [True, False]
