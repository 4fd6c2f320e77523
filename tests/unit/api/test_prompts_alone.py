"""max_tokens=0: a prompt is scored, and nothing is produced, on every way in."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pagewire import LLM, SamplingParams
from pagewire.errors import InvalidArgumentError
from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from tests.fakes.fake_engine import build_fake_engine, fake_config
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
    sse_events,
)

HELLO = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
REASONS = "{# <think> </think> #}{% for m in messages %}{{ m.content }}{% endfor %}<think>"


async def completion(client: FakeEngineClient, **body: Any) -> Any:
    async with http_client(await make_serving(client)) as http:
        body = {"prompt": "abc", "max_tokens": 0, **body}
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return sse_events(response.text) if body.get("stream") else response.json()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_echo_ends_once_with_no_token_counted(n: int) -> None:
    *events, usage, done = await completion(
        FakeEngineClient(),
        echo=True,
        logprobs=1,
        n=n,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    assert done == "[DONE]"
    for index in range(n):
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == "abc"
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        tokens = [t for part in parts if part["logprobs"] for t in part["logprobs"]["tokens"]]
        assert tokens == ["a", "b", "c"]
        assert all(part["token_ids"] == [] for part in parts)
    assert usage["usage"]["completion_tokens"] == 0
    assert usage["usage"]["total_tokens"] == 3


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_whole_echo_has_the_prompt_and_no_more(logprobs: int | None) -> None:
    client = FakeEngineClient()
    answer = await completion(client, echo=True, logprobs=logprobs, prompt=["abc", "de"])
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "de"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    for choice, length in zip(answer["choices"], (3, 2), strict=True):
        told = choice["logprobs"] and choice["logprobs"]["token_logprobs"]
        assert told == (None if logprobs is None else [None, *[-0.5] * (length - 1)])
    assert answer["usage"]["completion_tokens"] == 0
    # The step that computes a prompt samples a token: no more than that one was asked for.
    assert [request.sampling_params.max_tokens for request in client.requests] == [1, 1]


async def test_an_echo_that_beams_or_candidates_would_follow_stands_alone_too() -> None:
    for more in ({"best_of": 3}, {"use_beam_search": True, "n": 2}):
        client = FakeEngineClient()
        answer = await completion(client, echo=True, **more)
        assert {choice["text"] for choice in answer["choices"]} == {"abc"}
        assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_go_without_an_echo() -> None:
    answer = await completion(FakeEngineClient(), prompt_logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert len(choice["prompt_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    "more",
    [{}, {"tools": [TOOL], "tool_choice": "required"}, {"thinking_token_budget": 0}],
)
async def test_a_chats_prompt_can_be_scored(name: str, more: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "abc"}]
    client = FakeEngineClient(chat_template=REASONS)
    async with http_client(await make_serving(client)) as http:
        body = {"messages": messages, name: 0, "prompt_logprobs": 0, **more}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] > 3
    assert answer["usage"]["completion_tokens"] == 0
    assert len(client.requests) == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": -1, "prompt_logprobs": 0}, "max_tokens"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        (
            "chat/completions",
            {"max_completion_tokens": -1, "prompt_logprobs": 0},
            "max_completion_tokens",
        ),
        ("responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_no_token_of_nothing_is_refused(path: str, body: dict[str, Any], field: str) -> None:
    if path == "chat/completions":
        body = {"messages": [HELLO], **body}
    async with http_client(await make_serving(FakeEngineClient())) as http:
        response = await http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "takes_scores"),
    [
        ("completions", {"prompt": "a", "max_tokens": 0}, True),
        ("chat/completions", {"messages": [HELLO], "max_tokens": 0}, True),
        ("chat/completions", {"messages": [HELLO], "max_completion_tokens": 0}, True),
        ("responses", {"input": "a", "max_output_tokens": 0}, False),
    ],
)
async def test_the_refusal_says_what_is_needed_where_it_can_be_had(
    path: str, body: dict[str, Any], takes_scores: bool
) -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        response = await http.post(f"/v1/{path}", json=body)
    message = response.json()["error"]["message"]
    assert "must be at least 1, not 0" in message
    assert ("needs prompt_logprobs (or echo" in message) is takes_scores


SCORED = sampling_pb2.SamplingParams(max_tokens=0, prompt_logprobs=0)


async def test_grpc_scores_a_prompt_streamed_and_whole() -> None:
    request = inference_pb2.GenerateRequest(text="abc", sampling_params=SCORED)
    async with running_frontend(FakeEngineClient()) as server, grpc_stub(server) as stub:
        whole = await stub.GenerateUnary(request)
        parts = [part async for part in stub.Generate(request)]
        chat = await stub.ChatUnary(chat_request("abc", sampling_params=SCORED))
    told = inference_pb2.GenerateResponse()
    for part in parts:
        told.MergeFrom(part)
    for answer in (whole, told):
        (output,) = answer.outputs
        assert (output.text, list(output.token_ids)) == ("", [])
        assert output.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        assert [p.token.text for p in answer.prompt_logprobs] == ["b", "c"]
        assert answer.usage.completion_tokens == 0
    assert chat.choices[0].content == ""
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens - 1
    assert chat.usage.completion_tokens == 0


async def test_grpc_refuses_no_token_of_nothing() -> None:
    request = inference_pb2.GenerateRequest(
        text="abc", sampling_params=sampling_pb2.SamplingParams(max_tokens=0)
    )
    async with running_frontend(FakeEngineClient()) as server, grpc_stub(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GenerateUnary(request)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (raised.value.details() or "").startswith("sampling_params.max_tokens: ")


async def test_no_token_is_counted_and_the_request_ends_once() -> None:
    serving = await make_serving(FakeEngineClient())
    async with http_client(serving) as http:
        body = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 0}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        lines = (await http.get("/metrics")).text.splitlines()
    counted = {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(name))
        for name in ("pagewire_generation_tokens_total", "pagewire_request_success_total")
    }
    assert counted == {
        "pagewire_generation_tokens_total": 0.0,
        "pagewire_request_success_total": 1.0,
    }


def test_offline_a_prompt_is_scored_by_a_real_engine_loop() -> None:
    with LLM.from_client(InProcessEngineClient(fake_config(), build=build_fake_engine)) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert [position is None for position in output.prompt_logprobs] == [True, False, False]
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "length")


def test_offline_no_token_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs"):
        SamplingParams(max_tokens=0)
