"""Fields of many values are counted before anything looks at each, and null content is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.chat_messages import MAX_MESSAGES, MAX_TOOLS
from pagewire_frontend.grpc_api import requests
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving

DEFAULTS = SamplingParams()


def generate(request: inference_pb2.GenerateRequest) -> object:
    return requests.generation_request(request, "m", DEFAULTS, 100)


def sampled(**fields: object) -> object:
    params = sampling_pb2.SamplingParams(**fields)  # type: ignore[arg-type]  # by keyword
    request = inference_pb2.GenerateRequest(sampling_params=params)
    return requests.sampling_params(request, DEFAULTS)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        (
            "prompt_token_ids",
            lambda: generate(
                inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 101))
            ),
        ),
        (
            "logit_bias",
            lambda: sampled(logit_bias=[sampling_pb2.LogitBias()] * (MAX_LOGIT_BIASES + 1)),
        ),
        ("stop_token_ids", lambda: sampled(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1))),
        (
            "stop",
            lambda: generate(
                inference_pb2.GenerateRequest(
                    text_params=inference_pb2.TextParams(stop=["a"] * (MAX_STOP_STRINGS + 1))
                )
            ),
        ),
        (
            "messages",
            lambda: requests.chat_messages([inference_pb2.ChatMessage()] * (MAX_MESSAGES + 1)),
        ),
        ("tools", lambda: requests.tool_definitions([inference_pb2.Tool()] * (MAX_TOOLS + 1))),
    ],
)
def test_too_many_values_over_grpc_are_refused_by_field(
    field: str, call: Callable[[], object]
) -> None:
    with pytest.raises(InvalidArgumentError, match="at most") as raised:
        call()
    assert raised.value.field == field


@pytest.mark.parametrize("answer", [{"content": None}, {}])
async def test_an_answer_without_content_is_served_over_http(answer: dict[str, object]) -> None:
    client = FakeEngineClient(reply=lambda request, index: "ok")
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", **answer},
        {"role": "user", "content": "and?"},
    ]
    async with http_client(await make_serving(client)) as http:
        response = await http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    prompt = bytes(i for i in client.requests[0].prompt_token_ids if i < 256)
    assert b"None" not in prompt


def test_an_answer_without_content_over_grpc_has_none() -> None:
    (message,) = requests.chat_messages([inference_pb2.ChatMessage(role="assistant")])
    assert "content" not in message
