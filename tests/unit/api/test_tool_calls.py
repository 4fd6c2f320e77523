"""Tool calls and reasoning in both APIs' shapes, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from tokenizers import AddedToken

from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason
from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.grpc_api.requests import tool_definitions
from pagewire_frontend.tool_choice import tool_use
from tests.fakes.fake_engine_client import (
    IM_END,
    FakeEngineClient,
    byte_tokenizer,
    tokenizer_files,
)
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
    sse_events,
)
from tests.fakes.replaying_client import ReplayingClient, turns_of

TEMPLATE = (
    "{# <tool_call> </think> #}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.location }}{% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"location": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
REPLY = (
    "<think>\nWhere? 1 < 2.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLS = [("get_weather", '{"location": "Zürich"}'), ("now", "{}")]


def client(reply: str = REPLY, **settings: Any) -> FakeEngineClient:
    return FakeEngineClient(reply=lambda request, index: reply, chat_template=TEMPLATE, **settings)


async def post(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Weather?"}]
    response = await http.post("/v1/chat/completions", json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    return response


async def answer(reply: str = REPLY, **body: Any) -> dict[str, Any]:
    async with http_client(await make_serving(client(reply))) as http:
        choice: dict[str, Any] = (await post(http, **body)).json()["choices"][0]
        return choice


async def streamed(reply: str = REPLY, tokens_a_step: int = 1, **body: Any) -> list[dict[str, Any]]:
    engine = client(reply, tokens_a_step=tokens_a_step)
    async with http_client(await make_serving(engine)) as http:
        events = sse_events((await post(http, stream=True, **body)).text)
    assert events.pop() == "[DONE]"
    return [event["choices"][0] for event in events]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that OpenAI's clients make of chunks."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    message["calls"] = [tuple(call) for call in message["calls"]]
    return message


async def test_a_whole_answer_has_reasoning_content_and_calls() -> None:
    choice = await answer(tools=TOOLS)
    message = choice["message"]
    assert message["content"] == "Let me look."
    assert message["reasoning_content"] == message["reasoning"] == "Where? 1 < 2."
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == (
        CALLS
    )
    assert {c["type"] for c in message["tool_calls"]} == {"function"}
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tokens_a_step", [1, 7, 1000])
async def test_a_streamed_answer_is_the_same(tokens_a_step: int) -> None:
    choices = await streamed(tokens_a_step=tokens_a_step, tools=TOOLS)
    assert joined(choices) == {
        "content": "Let me look.",
        "reasoning": "Where? 1 < 2.",
        "reasoning_content": "Where? 1 < 2.",
        "calls": CALLS,
    }
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    kinds = [frozenset(c["delta"]) & {"content", "reasoning", "tool_calls"} for c in choices[1:-1]]
    assert all(len(kind) == 1 for kind in kinds)


async def test_arguments_are_streamed_in_pieces() -> None:
    pieces = [
        call["function"]["arguments"]
        for choice in await streamed(tools=TOOLS)
        for call in choice["delta"].get("tool_calls", ())
        if call["index"] == 0
    ]
    assert len(pieces) > 10


async def test_log_probabilities_and_token_ids_stay_with_the_chunks() -> None:
    choices = await streamed(tools=TOOLS, logprobs=True, return_token_ids=True)
    message = joined(choices)
    assert (message["content"], message["calls"]) == ("Let me look.", CALLS)
    token_ids = [i for choice in choices for i in choice.get("token_ids", ())]
    positions = [p for choice in choices for p in (choice["logprobs"] or {}).get("content", ())]
    assert len(token_ids) == len(positions) == len(REPLY.encode()) + 1


async def test_without_text_beside_calls_content_is_null() -> None:
    reply = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = (await answer(reply, tools=TOOLS))["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


async def test_no_parallel_calls_means_one_at_most() -> None:
    message = (await answer(tools=TOOLS, parallel_tool_calls=False))["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert joined(await streamed(tools=TOOLS, parallel_tool_calls=False))["calls"] == CALLS[:1]


async def test_no_tool_choice_leaves_calls_in_the_text() -> None:
    choice = await answer(tools=TOOLS, tool_choice="none")
    assert choice["message"]["content"] == REPLY.split("</think>\n\n")[1]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_a_call_cut_off_by_length_keeps_its_finish_reason() -> None:
    reply = '<tool_call>{"name": "now", "arguments": {"a": "long long"}}</tool_call>'
    choice = await answer(reply, tools=TOOLS, max_tokens=50)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"a": "long long"}}'.startswith(call["function"]["arguments"])


async def test_reasoning_is_left_out_where_the_client_wants_none() -> None:
    message = (await answer(include_reasoning=False))["message"]
    assert "reasoning_content" not in message
    assert message["content"].startswith("Let me look.")
    assert joined(await streamed(include_reasoning=False))["reasoning"] == ""


async def test_no_effort_reaches_the_template() -> None:
    engine = client()
    async with http_client(await make_serving(engine)) as http:
        await post(http, reasoning_effort="none")
        await post(http)
    off, on = (len(request.prompt_token_ids) for request in engine.requests)
    assert off == on + len("off")


async def test_calls_and_results_go_back_to_the_template() -> None:
    engine = client("Rain.")
    function = {"name": "f", "arguments": '{"location": "Z"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "W"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    async with http_client(await make_serving(engine)) as http:
        await post(http, messages=messages, tools=TOOLS)
    assert len(engine.requests[0].prompt_token_ids) == len("user:W;assistant:Z;tool:rain;")


@pytest.mark.parametrize("name", ["none", "auto"])
async def test_tools_of_a_model_without_a_known_format_are_refused(name: str) -> None:
    engine = FakeEngineClient()
    serving = await make_serving(engine)
    serving.connect(await Generation.create(engine, GenerationSettings(tool_call_parser=name)))
    async with http_client(serving) as http:
        response = await http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "tools": TOOLS},
        )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]


async def test_the_operators_parsers_win_over_the_template() -> None:
    settings = GenerationSettings(tool_call_parser="functionary", reasoning_parser="none")
    engine = client('<think>a</think><function=now>{"a": 1}</function>')
    serving = await make_serving(engine)
    serving.connect(await Generation.create(engine, settings))
    async with http_client(serving) as http:
        message = (await post(http, tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def grpc_tools() -> list[inference_pb2.Tool]:
    schema = Struct()
    schema.update(PARAMETERS)
    return [
        inference_pb2.Tool(name="get_weather", parameters=schema),
        inference_pb2.Tool(name="now"),
    ]


async def test_a_schema_as_text_keeps_the_order_of_its_properties() -> None:
    names = ["zulu", "alpha", "mike", "bravo"]
    schema = json.dumps({"type": "object", "properties": {name: {} for name in names}})
    tools = tool_definitions([inference_pb2.Tool(name="now", parameters_json=schema)])
    assert tools is not None
    assert list(tools[0]["function"]["parameters"]["properties"]) == names
    for wrong in ("{", "[]", "7"):
        with pytest.raises(InvalidArgumentError, match=r"tools\[0\].parameters_json"):
            tool_definitions([inference_pb2.Tool(name="now", parameters_json=wrong)])


async def test_two_tools_of_one_name_are_refused() -> None:
    async with http_client(await make_serving(client())) as http:
        response = await http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "tools": [TOOLS[0], *TOOLS]},
        )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[1].function.name"


async def test_grpc_answers_the_same_streamed_and_whole() -> None:
    request = chat_request("Weather?", tools=grpc_tools())
    async with running_frontend(client()) as server, grpc_stub(server) as stub:
        (whole,) = (await stub.ChatUnary(request)).choices
        text, reasoning, calls, reason = "", "", [], 0
        async for message in stub.Chat(request):
            for choice in message.choices:
                text += choice.content
                reasoning += choice.reasoning_content
                for call in choice.tool_calls:
                    if call.name:
                        calls.append((call.name, ""))
                    name, arguments = calls[call.index]
                    calls[call.index] = (name, arguments + call.arguments)
                reason = choice.finish_reason or reason
    assert (whole.content, whole.reasoning_content) == ("Let me look.", "Where? 1 < 2.")
    assert [(call.name, call.arguments, call.index) for call in whole.tool_calls] == [
        (name, arguments, n) for n, (name, arguments) in enumerate(CALLS)
    ]
    assert (text, reasoning, calls) == (whole.content, whole.reasoning_content, CALLS)
    assert reason == whole.finish_reason == sampling_pb2.FINISH_REASON_TOOL_CALLS


async def test_grpc_knows_the_same_choices() -> None:
    async with running_frontend(client()) as server, grpc_stub(server) as stub:

        async def ask(**fields: Any) -> dict[str, Any]:
            request = chat_request("Weather?", tools=grpc_tools(), **fields)
            (choice,) = (await stub.ChatUnary(request)).choices
            return MessageToDict(choice)

        assert len((await ask(parallel_tool_calls=False))["toolCalls"]) == 1
        assert "toolCalls" not in await ask(tool_choice={"mode": "MODE_NONE"})
        assert "reasoningContent" not in await ask(include_reasoning=False)


async def test_parsers_see_control_tokens_that_clients_do_not() -> None:
    tokenizer = byte_tokenizer()
    marks = ["[TOOL_CALLS]", "[ARGS]"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])

    async def ask(reply: str) -> tuple[str, list[tuple[str, str]], FinishReason | None]:
        ids = list(tokenizer.encode(reply + IM_END).ids)

        def turns(request: EngineRequest) -> list[list[TokenDelta] | Exception]:
            return list(turns_of(ids, finish_reason=FinishReason.STOP))

        engine = ReplayingClient(
            tokenizer_files("{# [TOOL_CALLS] #}x", tokenizer),
            turns,
            vocab_size=tokenizer.get_vocab_size(),
        )
        generation = await Generation.create(engine, GenerationSettings())
        rendered = generation.render_chat([{"role": "user", "content": "x"}], tools=TOOLS)
        request = GenerationRequest(
            prompt_token_ids=rendered.token_ids,
            answer=generation.answer_format(rendered, tool_use(TOOLS)),
        )
        whole = await (await generation.start(request)).collect()
        (sequence,) = whole.sequences
        calls = [(call.name, call.arguments) for call in sequence.tool_calls]
        return sequence.text, calls, sequence.finish_reason

    assert await ask('Hi<|im_start|>[TOOL_CALLS]now[ARGS]{"a": 1}') == (
        "Hi",
        [("now", '{"a": 1}')],
        FinishReason.TOOL_CALLS,
    )
    assert await ask("Hi [TOOL_CALLS] there[ARGS]") == ("Hi  there", [], FinishReason.STOP)


async def test_openais_client_puts_a_streamed_call_together() -> None:
    import openai

    async with running_frontend(client()) as server:
        sdk = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="x", max_retries=0
        )
        async with sdk.chat.completions.stream(
            model="fake-model",
            messages=[{"role": "user", "content": "Weather?"}],
            tools=TOOLS,  # type: ignore[arg-type]
        ) as stream:
            kinds = [event.type async for event in stream]
            message = (await stream.get_final_completion()).choices[0].message
        await sdk.close()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert message.content == "Let me look."
    functions = [call.function for call in message.tool_calls or []]
    assert [(function.name, function.arguments) for function in functions] == CALLS
