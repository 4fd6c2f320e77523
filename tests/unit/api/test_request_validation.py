"""Values that can't be served are refused at the edge, by both APIs, and the refusal names the
field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.openai_api.app import create_app
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, http_client, make_serving
from tests.unit.api.refusals import OUTSIDE, chat, error_of, post, refused

NAN, INF = float("nan"), float("inf")

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


@pytest.mark.parametrize(("token_id", "bias"), [(OUTSIDE, 1.0), (1, -101.0), (1, NAN)])
async def test_grpc_refuses_a_bad_logit_bias(serving: Serving, token_id: int, bias: float) -> None:
    entry = sampling_pb2.LogitBias(token_id=token_id, bias=bias)
    params = sampling_pb2.SamplingParams(logit_bias=[entry])
    context = await refused(serving, "Chat", chat_request(sampling_params=params))
    assert context.violations() == ["sampling_params.logit_bias"]


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
