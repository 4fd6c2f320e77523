"""Responses have exactly the shapes that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pagewire.errors import InternalError, InvalidArgumentError
from tests.fakes.fake_engine_client import EOS_ID, MODEL, FakeEngineClient, ids_of
from tests.fakes.frontend import http_client, make_serving, sse_events


async def ask(client: FakeEngineClient, path: str, **body: Any) -> httpx.Response:
    async with http_client(await make_serving(client)) as http:
        return await http.post(path, json=body)


async def complete(client: FakeEngineClient | None = None, **body: Any) -> Any:
    body = {"prompt": "ab", **body}
    response = await ask(client or FakeEngineClient(), "/v1/completions", **body)
    assert response.status_code == 200, response.text
    return sse_events(response.text) if body.get("stream") else response.json()


async def chat(client: FakeEngineClient | None = None, **body: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    response = await ask(client or FakeEngineClient(), "/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return sse_events(response.text) if body.get("stream") else response.json()


def check_metrics(metrics: dict[str, Any]) -> None:
    """The seconds of the phases, as the fake engine has them."""
    assert (metrics["queue_s"], metrics["prefill_s"], metrics["steps"]) == (0.25, 0.5, 14)
    assert metrics["step_s"] == 0.5 + metrics["decode_s"]
    assert metrics["total_s"] >= metrics["time_to_first_token_s"] > 0
    assert metrics["decode_s"] > 0
    assert metrics["preemptions"] == 0


async def test_a_whole_chat_answer() -> None:
    answer = await chat(FakeEngineClient(cached_tokens=5))
    check_metrics(answer.pop("metrics"))
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    prompt_tokens = len(ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 14,
            "total_tokens": prompt_tokens + 14,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }


async def test_a_streamed_chat_answer() -> None:
    client = FakeEngineClient(reply=lambda request, index: "Hé", tokens_a_step=2)
    *chunks, done = await chat(client, stream=True)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "H"}, None),
        ({"content": "é"}, None),
        ({}, "stop"),
    ]
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason", "stop_reason"}
               for choice in choices)  # fmt: skip


async def test_usage_is_a_chunk_of_its_own_and_null_in_the_others() -> None:
    for events in (
        await chat(stream=True, stream_options={"include_usage": True}),
        await complete(stream=True, stream_options={"include_usage": True}),
    ):
        *chunks, last, done = events
        assert done == "[DONE]"
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 14
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 14
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        check_metrics(last["metrics"])


async def test_a_whole_completion() -> None:
    answer = await complete()
    check_metrics(answer.pop("metrics"))
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "Hello, world!",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 14,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_completions_stop_at_sixteen_tokens_unless_told() -> None:
    client = FakeEngineClient(reply=lambda request, index: "x" * 50)
    choice = (await complete(client))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")
    choice = (await complete(client, max_tokens=20))["choices"][0]
    assert choice["text"] == "x" * 20


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_sequences_get_indexes_prompt_by_prompt(stream: bool) -> None:
    client = FakeEngineClient(reply=lambda request, index: f"{request.prompt_token_ids[0]}-{index}")
    answer = await complete(client, prompt=[[65], [66, 67], [68]], n=2, stream=stream)
    texts = dict.fromkeys(range(6), "")
    for part in answer[:-1] if stream else [answer]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["65-0", "65-1", "66-0", "66-1", "68-0", "68-1"]
    if not stream:
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 6 * 5


async def test_a_stop_string_is_the_stop_reason() -> None:
    client = FakeEngineClient()
    choice = (await complete(client, stop=["wor", "zzz"]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "Hello, ",
        "stop",
        "wor",
    )
    choice = (await chat(client, stop="wor", include_stop_str_in_output=True))["choices"][0]
    assert choice["message"]["content"] == "Hello, wor"
    *_, last, _ = await chat(client, stop="wor", stream=True)
    assert last["choices"][0]["stop_reason"] == "wor"


async def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    client = FakeEngineClient(reply=lambda request, index: "é")
    logprobs = (await chat(client, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, second, end = logprobs["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], -0.5)
    assert second["bytes"] == [0xA9]
    assert end["token"] == "<|im_end|>"
    assert [set(top) for top in first["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    assert first["top_logprobs"][0]["bytes"] == [0xC3]
    *chunks, _ = await chat(client, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        position
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for position in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == logprobs["content"]


async def test_chat_without_top_logprobs_gives_the_tokens_own() -> None:
    content = (await chat(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert "".join(position["token"] for position in content) == "Hello, world!<|im_end|>"
    assert all(position["top_logprobs"] == [] for position in content)


async def test_completion_logprobs_are_four_columns() -> None:
    client = FakeEngineClient(reply=lambda request, index: "héy")
    logprobs = (await complete(client, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["text_offset"][:2] == [0, 1]
    assert logprobs["text_offset"][3:] == [2, 3]
    assert [top["h"] for top in logprobs["top_logprobs"][:1]] == [-0.5]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    *chunks, _ = await complete(client, logprobs=2, stream=True)
    for column, values in logprobs.items():
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [value for part in parts if part for value in part[column]] == values


async def test_completion_logprobs_zero_has_no_alternatives() -> None:
    logprobs = (await complete(logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert len(logprobs["tokens"]) == 14


@pytest.mark.parametrize("prompt", ["héy", ids_of("héy")])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first_with_its_logprobs(prompt: Any, stream: bool) -> None:
    client = FakeEngineClient(reply=lambda request, index: "OK")
    answer = await complete(client, prompt=prompt, echo=True, logprobs=1, stream=stream)
    parts = [part["choices"][0] for part in (answer[:-1] if stream else [answer])]
    assert "".join(part["text"] for part in parts) == "héyOK"
    columns = {
        name: [value for part in parts for value in part["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
    }
    assert columns["tokens"] == [
        "h", "bytes:\\xc3", "bytes:\\xa9", "y", "O", "K", "<|im_end|>"
    ]  # fmt: skip
    assert columns["token_logprobs"] == [None, *[-0.5] * 6]
    assert columns["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert columns["top_logprobs"][0] is None
    assert columns["top_logprobs"][1] == {"bytes:\\xc3": -0.5}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_no_tokens_scores_the_prompt_alone(stream: bool) -> None:
    answer = await complete(echo=True, logprobs=1, max_tokens=0, temperature=0, stream=stream)
    parts = [part["choices"][0] for part in (answer[:-1] if stream else [answer])]
    assert "".join(part["text"] for part in parts) == "ab"
    assert parts[-1]["finish_reason"] == "length"
    assert parts[0]["logprobs"]["tokens"] == ["a", "b"]
    if not stream:
        assert answer["usage"]["completion_tokens"] == 0


async def test_token_ids_come_with_the_text_where_asked_for() -> None:
    expected = [*ids_of("Hello, world!"), EOS_ID]
    assert (await complete(return_token_ids=True))["choices"][0]["token_ids"] == expected
    *chunks, _ = await chat(return_token_ids=True, stream=True)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == expected


async def test_extensions_reach_the_engine() -> None:
    client = FakeEngineClient()
    given = {
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "skip_special_tokens": False,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "temperature": 0.75,
        "top_p": 0.5,
    }
    await chat(client, **given, logit_bias={"5": -100}, max_completion_tokens=9, priority=4)
    request = client.requests[0]
    params = request.sampling_params
    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected
    assert params.logit_bias == {5: -100}
    assert params.max_tokens == 9
    assert request.priority == 4


async def test_the_models_own_defaults_apply_where_a_request_is_silent() -> None:
    from pagewire.sampling_params import SamplingParams

    client = FakeEngineClient(default_sampling_params=SamplingParams(temperature=0.6, top_p=0.9))
    await chat(client, top_p=0.5)
    params = client.requests[0].sampling_params
    assert (params.temperature, params.top_p) == (0.6, 0.5)


async def test_a_failure_before_the_first_token_has_its_own_status() -> None:
    client = FakeEngineClient(fail_after=0)
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        response = await ask(client, "/v1/completions", **body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["type"] == "server_error"


async def test_a_failure_of_the_engine_names_the_field_as_the_client_does() -> None:
    failure = InvalidArgumentError("prompt", "does not fit in the pool")
    client = FakeEngineClient(fail_after=0, failure=failure)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for stream in (False, True):
        response = await ask(client, "/v1/chat/completions", **body, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


async def test_a_failure_in_mid_stream_is_an_event_before_done() -> None:
    client = FakeEngineClient(fail_after=3, failure=InternalError("the step failed"))
    *_, error, done = await chat(client, stream=True)
    assert done == "[DONE]"
    assert error["error"]["message"] == "the step failed"
    assert error["error"]["type"] == "server_error"
