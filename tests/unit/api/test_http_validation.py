"""Bodies that the HTTP API refuses, by the field's name, and what it passes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pagewire_frontend.openai_api.app import create_app
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving
from tests.unit.api.refusals import OUTSIDE, chat, error_of, post

NAN = float("nan")


# Made once: what is refused leaves no trace.
@pytest.fixture(scope="module")
def transport() -> httpx.ASGITransport:
    return httpx.ASGITransport(app=create_app(asyncio.run(make_serving(FakeEngineClient()))))


@pytest.fixture
async def http(transport: httpx.ASGITransport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize(
    "bias",
    [
        {str(OUTSIDE): 1.0},
        {"1": 101.0},
        {"1": NAN},
        {"x": 1},
        # Numbers for Python's int, and for nobody else.
        {"1_0": 1},
        {" 5": 1},
        {"+5": 1},
        {"٣": 1},
        # Token 5 where 32 bits are left of it.
        {str(2**32 + 5): 1},
        {"5" * 5000: 1},
        {"5": True},
        {"5": "1"},
        {"5": None},
    ],
)
async def test_http_refuses_a_bad_logit_bias(
    http: httpx.AsyncClient, bias: dict[str, float]
) -> None:
    assert error_of(await chat(http, logit_bias=bias))["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("n", 1.5),
        ("n", "2"),
        ("max_tokens", "16"),
        ("seed", 2**80),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("model", 7),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [5.5]),
        ("stop_token_ids", [2**32 + 5]),
        ("stop_token_ids", 5),
        ("n", 2**32 + 1),
        ("max_tokens", 2**32 + 4),
        ("top_k", 2**63),
        ("min_tokens", True),
        ("seed", 1.5),
        ("stop", ["a", ""]),
        ("stop", [["a"]]),
        ("logit_bias", [1]),
        ("stream_options", {"include_usage": True}),  # without stream
    ],
)
async def test_http_refuses_wrong_types(http: httpx.AsyncClient, field: str, value: Any) -> None:
    param = error_of(await chat(http, **{field: value}))["param"]
    assert param.split("[")[0].split(".")[0] == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
async def test_http_refuses_bad_chats(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    assert error_of(await chat(http, **body))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [OUTSIDE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": "x" * 3000}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "priority": 2**40}, "priority"),
        ({"prompt": "x", "priority": -1}, "priority"),
    ],
)
async def test_http_refuses_bad_completions(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    assert error_of(await post(http, "/v1/completions", **body))["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("store", True),
        ("guided_whitespace_pattern", " "),
        ("suffix", "tail"),
        ("bad_words", ["x"]),
        ("guided_json_object", True),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {}),
        ("request_id", "mine"),
    ],
)
async def test_http_refuses_known_features_that_are_not_served(
    http: httpx.AsyncClient, field: str, value: Any
) -> None:
    for response in (
        await chat(http, **{field: value}),
        await post(http, "/v1/completions", prompt="a", **{field: value}),
    ):
        assert error_of(response)["param"] == field
        refusal, _, remedy = error_of(response)["message"].partition(" by this server: ")
        assert remedy or "not supported" not in refusal


@pytest.mark.parametrize("field", ["echo", "add_special_tokens"])
async def test_chats_refuse_what_only_completions_have(http: httpx.AsyncClient, field: str) -> None:
    assert error_of(await chat(http, **{field: True}))["param"] == field
    completion = await post(http, "/v1/completions", prompt="a", **{field: True})
    assert completion.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_every_body_refuses_a_request_id(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    error = error_of(await post(http, path, **body, request_id="mine"))
    assert error["param"] == "request_id"
    assert "X-Request-Id" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {"prompt": "a", "suffix": "b"}, "fills in the middle"),
        ("completions", {"prompt": [[]]}, "empty list"),
        ("completions", {"prompt": "a", "top_k": 2**31}, "2147483647"),
        ("completions", {"prompt": "a", "seed": 2**63}, "seed: must fit in 64 bits"),
        ("completions", {"prompt": "a", "seed": 2**64}, "seed: must fit in 64 bits"),
        ("completions", {"prompt": "a", "seed": -(2**80)}, "seed: must fit in 64 bits"),
        ("completions", {"prompt": "a", "max_tokens": 2**64}, "max_tokens: must fit in 64 bits"),
        ("completions", {"prompt": "a", "seed": 1.5}, "seed: input should be a valid integer"),
        (
            "completions",
            {"prompt": "a", "stop_token_ids": [1, 2**64]},
            "stop_token_ids[1]: must fit in 64 bits",
        ),
        (
            "completions",
            {"prompt": "a", "logit_bias": {"7": True}},
            "logit_bias: its values must be numbers",
        ),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"include_usage": "x"}},
            "stream_options.include_usage: input should be",
        ),
        ("chat/completions", {"store": True}, "--response-store"),
        ("chat/completions", {"verbosity": "low"}, "in a message"),
        ("chat/completions", {"cache_salt": "x"}, "leave it out"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            '{"type": "text"',
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": [None]}]}, '"text": "..."'),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            "of type 'text'",
        ),
    ],
)
async def test_http_says_what_to_send_instead(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], says: str
) -> None:
    messages = {} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    assert says in error_of(await post(http, f"/v1/{path}", **messages | body))["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
)
async def test_http_refuses_wrong_tools_and_choices(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    assert error_of(await chat(http, **body))["param"] == param


async def test_completions_have_no_tools(http: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = await post(http, "/v1/completions", prompt="a", tools=tools)
    assert error_of(response)["param"] == "tools"


async def test_http_accepts_unknown_fields_and_neutral_values(http: httpx.AsyncClient) -> None:
    response = await chat(
        http,
        unheard_of=1,
        tools=None,
        tool_choice="auto",
        response_format={"type": "text"},
        store=False,
        metadata={"a": "b"},
        user="someone",
        modalities=["text"],
        guided_json_object=False,
        grammar=None,
        json_schema=None,
        echo=False,
        add_special_tokens=False,
        request_id=None,
        best_of=1,
        temperature=None,
        parallel_tool_calls=True,
        reasoning_effort="low",
    )
    assert response.status_code == 200


async def test_tools_reach_the_template_when_none_may_be_called() -> None:
    template = "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    client = FakeEngineClient(chat_template=template)
    async with http_client(await make_serving(client)) as http:
        tools = [{"type": "function", "function": {"name": "look_up"}}]
        response = await chat(http, tools=tools, tool_choice="none")
    assert response.status_code == 200
    assert len(client.requests[0].prompt_token_ids) == len("look_up;hi")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a":' * 2000, b'{"prompt": "\\ud800"}']
)
async def test_http_refuses_what_is_not_a_json_object(http: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await http.post("/v1/completions", content=body, headers=headers)
    error_of(response)


async def test_http_wants_a_json_content_type(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b'{"prompt": "a"}')
    assert "Content-Type: application/json" in error_of(response)["message"]


async def test_http_names_the_field_inside_an_object(http: httpx.AsyncClient) -> None:
    response = await chat(http, stream=True, stream_options={"include_usage": "x"})
    assert error_of(response)["param"] == "stream_options.include_usage"


@pytest.mark.parametrize(
    ("path", "field", "value", "place", "says"),
    [
        ("/v1/completions", "stop", {}, "stop", "a valid string or a valid list"),
        ("/v1/completions", "stop", ["a", 1], "stop[1]", "a valid string"),
        (
            "/v1/completions",
            "guided_json",
            5,
            "guided_json",
            "a valid string or a valid dictionary",
        ),
        ("/v1/responses", "input", 5, "input", "a valid string or a valid list"),
        ("/v1/responses", "input", ["Hi"], "input[0]", "a valid dictionary"),
        ("/v1/responses", "input", [{"role": "user"}, None], "input[1]", "a valid dictionary"),
    ],
)
async def test_http_says_of_which_kinds_a_field_may_be(
    http: httpx.AsyncClient, path: str, field: str, value: Any, place: str, says: str
) -> None:
    required = {"input": "Hi"} if path == "/v1/responses" else {"prompt": "Hi"}
    response = await http.post(path, json=required | {field: value})
    error = error_of(response)
    assert error["param"] == place
    assert error["message"] == f"{place}: input should be {says}"


async def test_http_errors_never_repeat_the_prompt(http: httpx.AsyncClient) -> None:
    secret = "my-secret-text"
    for body in (
        {"messages": secret},
        {"messages": [secret]},
        {"messages": [{"role": "user", "content": {"x": secret}}]},
        {"stop": {"x": secret}},
    ):
        assert secret not in (await chat(http, **body)).text
