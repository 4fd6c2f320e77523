"""Values that can't be served are refused at the edge, by both APIs, and the refusal names the
field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.grpc_api.inference import InferenceServicer
from pagewire_frontend.openai_api.app import create_app
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, http_client, make_serving

NAN, INF = float("nan"), float("inf")
OUTSIDE = 1_000_000

# (field, value) pairs that mean the same in both APIs.
BAD_SAMPLING: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", -1),
    ("n", 10_000),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", NAN),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("presence_penalty", NAN),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -INF),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 10**9),
    ("min_tokens", -1),
    ("stop_token_ids", [OUTSIDE]),
    # Beyond what a float32 or an int32 holds, and just beyond a bound.
    ("temperature", 1e39),
    ("temperature", -1e-9),
    ("top_p", 1.0000001),
    ("min_p", -1e-9),
    ("repetition_penalty", 1e39),
    ("n", -(2**31)),
    ("max_tokens", 2**31 - 1),
    ("stop_token_ids", [2**32 - 1]),
]


# Made once: what is refused leaves no trace.
@pytest.fixture(scope="module")
def serving() -> Serving:
    return asyncio.run(make_serving(FakeEngineClient()))


@pytest.fixture(scope="module")
def transport(serving: Serving) -> httpx.ASGITransport:
    return httpx.ASGITransport(app=create_app(serving))


@pytest.fixture
async def http(transport: httpx.ASGITransport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


class Context:
    """A call's context that remembers how the call was ended."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.status = status_pb2.Status()

    def invocation_metadata(self) -> tuple[()]:
        """None came with the call."""
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.code = code
        self.status.ParseFromString(dict(trailing_metadata)["grpc-status-details-bin"])
        assert self.status.message == details
        raise grpc.aio.AbortError

    def violations(self) -> list[str]:
        """The fields that google.rpc.BadRequest names."""
        fields = []
        for detail in self.status.details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request):
                fields += [violation.field for violation in bad_request.field_violations]
        return fields


async def refused(serving: Serving, method: str, request: Any) -> Context:
    """The context of a call that must have been aborted."""
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await getattr(InferenceServicer(serving), method)(request, context)
    return context


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    # json.dumps writes NaN and Infinity as Python clients do.
    return await http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )


async def chat(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return await post(http, "/v1/chat/completions", **{"messages": messages, **body})


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, whose shape is OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
async def test_http_refuses_bad_sampling_values(
    http: httpx.AsyncClient, field: str, value: Any
) -> None:
    for response in (
        await chat(http, **{field: value}),
        await post(http, "/v1/completions", prompt="a", **{field: value}),
    ):
        error = error_of(response)
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"
        assert field in error["message"]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
async def test_grpc_refuses_bad_sampling_values(serving: Serving, field: str, value: Any) -> None:
    params = sampling_pb2.SamplingParams(**{field: value})
    for method, request in (
        ("Chat", chat_request(sampling_params=params)),
        ("ChatUnary", chat_request(sampling_params=params)),
        ("Generate", inference_pb2.GenerateRequest(text="a", sampling_params=params)),
        ("GenerateUnary", inference_pb2.GenerateRequest(text="a", sampling_params=params)),
    ):
        context = await refused(serving, method, request)
        assert context.code == grpc.StatusCode.INVALID_ARGUMENT
        assert context.violations() == [f"sampling_params.{field}"]


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


@pytest.mark.parametrize(("token_id", "bias"), [(OUTSIDE, 1.0), (1, -101.0), (1, NAN)])
async def test_grpc_refuses_a_bad_logit_bias(serving: Serving, token_id: int, bias: float) -> None:
    entry = sampling_pb2.LogitBias(token_id=token_id, bias=bias)
    params = sampling_pb2.SamplingParams(logit_bias=[entry])
    context = await refused(serving, "Chat", chat_request(sampling_params=params))
    assert context.violations() == ["sampling_params.logit_bias"]


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
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("store", True),
        ("guided_whitespace_pattern", " "),
        ("suffix", "tail"),
        ("bad_words", ["x"]),
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


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {"prompt": "a", "suffix": "b"}, "fills in the middle"),
        ("completions", {"prompt": [[]]}, "empty list"),
        ("completions", {"prompt": "a", "top_k": 2**31}, "2147483647"),
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


async def test_http_errors_never_repeat_the_prompt(http: httpx.AsyncClient) -> None:
    secret = "my-secret-text"
    for body in (
        {"messages": secret},
        {"messages": [secret]},
        {"messages": [{"role": "user", "content": {"x": secret}}]},
        {"stop": {"x": secret}},
    ):
        assert secret not in (await chat(http, **body)).text


async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient, serving: Serving) -> None:
    error = error_of(await chat(http, model="other"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    context = await refused(serving, "Chat", chat_request(model="other"))
    assert context.code == grpc.StatusCode.NOT_FOUND
    assert context.violations() == ["model"]


async def test_a_model_without_a_template_says_how_to_pass_one() -> None:
    serving = await make_serving(FakeEngineClient(chat_template=None))
    async with http_client(serving) as http:
        assert "--chat-template" in error_of(await chat(http))["message"]
    context = await refused(serving, "Chat", chat_request())
    assert context.code == grpc.StatusCode.FAILED_PRECONDITION
    assert "--chat-template" in context.status.message


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("Generate", inference_pb2.GenerateRequest(), "prompt"),
        ("Generate", inference_pb2.GenerateRequest(text=""), "prompt"),
        ("Generate", inference_pb2.GenerateRequest(token_ids={"ids": []}), "token_ids.ids"),
        ("Generate", inference_pb2.GenerateRequest(token_ids={"ids": [OUTSIDE]}), "token_ids.ids"),
        ("Generate", inference_pb2.GenerateRequest(text="a", request_id="a b"), "request_id"),
        ("Generate", inference_pb2.GenerateRequest(text="a", request_id="a" * 200), "request_id"),
        (
            "Generate",
            inference_pb2.GenerateRequest(text="a", text_params={"stop": [""]}),
            "text_params.stop",
        ),
        ("Chat", inference_pb2.ChatRequest(), "messages"),
        ("Chat", chat_request("x" * 3000), "messages"),
        (
            "Chat",
            inference_pb2.ChatRequest(messages=[{"role": "wizard", "content": [{"text": "x"}]}]),
            "messages[0].role",
        ),
        (
            "Chat",
            inference_pb2.ChatRequest(
                messages=[{"role": "user", "content": [{"text": "x"}, {"image": {"url": "u"}}]}]
            ),
            "messages[0].content[1].image",
        ),
        (
            "Chat",
            inference_pb2.ChatRequest(messages=[{"role": "user", "content": [{}]}]),
            "messages[0].content[0].part",
        ),
        ("Chat", chat_request(tools=[{"name": "f"}]), "tools"),
        ("Chat", chat_request(tools=[{"name": "<f>"}]), "tools[0].name"),
        ("Chat", chat_request(tool_choice={"name": "f"}), "tool_choice"),
        ("Chat", chat_request(tool_choice={"mode": 3}), "tool_choice"),
        ("Chat", chat_request(tool_choice={"mode": 9}), "tool_choice.mode"),
        ("Chat", chat_request(thinking_token_budget=1), "thinking_token_budget"),
        ("Chat", chat_request(template_params={"documents": [{}]}), "template_params.documents"),
        (
            "Chat",
            chat_request(template_params={"documents": [{}] * 3000}),
            "template_params.documents",
        ),
        (
            "Chat",
            chat_request(sampling_params={"prompt_logprobs": 21}),
            "sampling_params.prompt_logprobs",
        ),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[OUTSIDE]), "token_ids"),
    ],
)
async def test_grpc_refuses_bad_requests(
    serving: Serving, method: str, request_message: Any, field: str
) -> None:
    context = await refused(serving, method, request_message)
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert context.violations() == [field]


async def test_grpc_refuses_a_content_part_of_a_kind_from_the_future(serving: Serving) -> None:
    part = inference_pb2.ContentPart()
    part.MergeFromString(b"\xfa\x01\x01x")  # field 31, which this version does not know
    request = inference_pb2.ChatRequest(messages=[{"role": "user", "content": [part]}])
    context = await refused(serving, "Chat", request)
    assert context.violations() == ["messages[0].content[0].part"]


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary", "Chat", "ChatUnary"])
async def test_grpc_refuses_to_go_before_others(serving: Serving, method: str) -> None:
    request = (
        chat_request(priority=-1)
        if method.startswith("Chat")
        else inference_pb2.GenerateRequest(text="x", priority=-1)
    )
    context = await refused(serving, method, request)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.violations() == ["priority"]
    assert "--allow-high-priority" in context.status.message


async def test_an_operator_may_let_clients_go_before_others() -> None:
    engine = FakeEngineClient()
    serving = await make_serving(engine, allow_high_priority=True)
    async with http_client(serving) as http:
        response = await post(http, "/v1/completions", prompt="x", priority=-3)
    assert response.status_code == 200
    assert [request.priority for request in engine.requests] == [-3]
