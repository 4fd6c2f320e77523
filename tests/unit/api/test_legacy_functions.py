"""OpenAI's first function calls: asked for by `functions`, answered as `function_call`."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.fakes.calling_model import replying
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving, running_frontend, sse_events

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [{"name": "weather", "description": "d", "parameters": PARAMETERS}, {"name": "now"}]
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


async def chat(client: FakeEngineClient, **body: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], "functions": FUNCTIONS, **body}
    async with http_client(await make_serving(client)) as http:
        return await http.post("/v1/chat/completions", json=body)


async def answer(reply: str, **body: Any) -> Any:
    response = await chat(replying(reply), **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_an_answer_has_one_function_call(choice: str | None) -> None:
    told = await answer(f"One moment.\n{CALL}{SECOND}", function_call=choice)
    assert told["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
    assert "tool_calls" not in told["message"]
    assert (told["message"]["content"], told["finish_reason"]) == ("One moment.", "function_call")
    alone = await answer(CALL, function_call=choice)
    assert alone["message"]["content"] is None


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
@pytest.mark.parametrize("tokens_a_step", [1, 7, 1000])
async def test_a_streamed_answer_is_the_same(tokens_a_step: int, more: dict[str, Any]) -> None:
    response = await chat(
        replying(f"One.\n{CALL}{SECOND}", tokens_a_step=tokens_a_step), stream=True, **more
    )
    choices = [event["choices"][0] for event in sse_events(response.text)[:-1]]
    calls = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "name" in calls[0]
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS
    assert "".join(c["delta"].get("content") or "" for c in choices) == "One."
    assert all("tool_calls" not in choice["delta"] for choice in choices)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["function_call"]


async def test_none_leaves_calls_in_the_text() -> None:
    told = await answer(CALL, function_call="none")
    assert (told["message"]["content"], told["finish_reason"]) == (CALL, "stop")


async def test_a_named_function_is_demanded() -> None:
    client = replying(ARGUMENTS)
    response = await chat(client, function_call={"name": "weather"})
    (choice,) = response.json()["choices"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "function_call"
    constraint = client.requests[0].sampling_params.structured_output
    assert constraint is not None
    assert json.loads(constraint.json_schema or "") == PARAMETERS


async def test_the_template_shows_them_and_tokenize_tells_the_same() -> None:
    client = replying("x")
    await chat(client)
    messages = [{"role": "user", "content": "Hi"}]
    async with http_client(await make_serving(client)) as http:
        body = {"messages": messages, "functions": FUNCTIONS}
        told = (await http.post("/tokenize", json=body)).json()
    assert told["tokens"] == client.requests[0].prompt_token_ids
    assert told["count"] == len("weather,now,Hi")


F = [{"name": "f"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"functions": [{"name": "f", "parameters": "x"}]}, "functions[0].parameters"),
        ({"functions": ["f"]}, "functions[0]"),
        ({"functions": F * 1001}, "functions"),
        ({"functions": F, "tools": TOOLS}, "functions"),
        ({"functions": F, "tool_choice": "auto"}, "functions"),
        ({"functions": F, "function_call": {"name": "g"}}, "function_call"),
        ({"functions": F, "function_call": {}}, "function_call"),
        ({"functions": F, "function_call": "required"}, "function_call"),
        ({"functions": F, "function_call": 7}, "function_call"),
        ({"functions": F, "function_call": {"name": "f"}, "guided_regex": "a"}, "function_call"),
        ({"functions": None, "function_call": {"name": "f"}}, "function_call"),
        ({"functions": [], "function_call": "none", "tools": TOOLS}, "function_call"),
    ],
)  # fmt: skip
async def test_what_cant_be_served_is_named_as_it_was_sent(body: Any, param: str) -> None:
    response = await chat(replying("x"), **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_a_model_without_a_known_format_says_so_of_functions() -> None:
    response = await chat(FakeEngineClient())
    assert response.json()["error"]["param"] == "functions"


async def test_without_functions_a_call_of_none_asks_for_nothing() -> None:
    for body in ({"functions": []}, {"functions": None, "function_call": "none"}):
        told = await answer(CALL, **body)
        assert told["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "a"}), ("responses", {"input": "a"})]
)
async def test_other_routes_say_which_take_functions(path: str, body: dict[str, Any]) -> None:
    async with http_client(await make_serving(replying("x"))) as http:
        for more in ({"functions": F}, {"function_call": {"name": "f"}}):
            response = await http.post(f"/v1/{path}", json=body | more)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] in more
            assert "/v1/chat/completions takes it" in error["message"]


async def test_openais_client_calls_a_function() -> None:
    async with running_frontend(replying(CALL)) as server:
        url = f"http://127.0.0.1:{server.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            told = await client.chat.completions.create(
                model="fake-model",
                messages=[{"role": "user", "content": "Hi"}],
                functions=[{"name": "weather", "parameters": PARAMETERS}],
            )
    assert told.choices[0].finish_reason == "function_call"
    call = told.choices[0].message.function_call
    assert call is not None
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
