"""`/v1/responses`: items and events as OpenAI's client reads them, and the bounded store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from pagewire_frontend.openai_api.app import create_app
from pagewire_frontend.openai_api.response_input import messages_of
from pagewire_frontend.openai_api.response_store import ResponseStore, StoredResponse
from tests.fakes.fake_engine_client import FakeEngineClient, ids_of
from tests.fakes.frontend import http_client, make_serving
from tests.unit.api.test_tool_calls import CALLS, REPLY, TEMPLATE

CHAT_TOOL_NAMES = ("get_weather", "now")
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": None}
    for name in CHAT_TOOL_NAMES
]

CALL = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}


def replying(text: str = "Hello, world!", **fields: Any) -> FakeEngineClient:
    return FakeEngineClient(reply=lambda *_: text, **fields)


def thinking(**fields: Any) -> FakeEngineClient:
    return replying(REPLY, chat_template=TEMPLATE, **fields)


@asynccontextmanager
async def openai_client(
    engine: FakeEngineClient, key: str = "k", **config: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    serving = await make_serving(engine, **config)
    transport = httpx.ASGITransport(app=create_app(serving))
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(
            api_key=key, base_url="http://test/v1", http_client=http, max_retries=0
        )


async def created(engine: FakeEngineClient, **body: Any) -> dict[str, Any]:
    async with http_client(await make_serving(engine)) as http:
        answer = await http.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def refused(**body: Any) -> tuple[int, str]:
    async with http_client(await make_serving(thinking())) as http:
        answer = await http.post("/v1/responses", json={"input": "hi", **body})
    return answer.status_code, answer.json()["error"]["param"]


async def test_a_text_gets_a_text() -> None:
    async with openai_client(replying()) as client:
        response = await client.responses.create(model="fake-model", input="hi")
    assert response.output_text == "Hello, world!"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == (
        response.usage.input_tokens + response.usage.output_tokens
    )
    assert response.store is False  # type: ignore[attr-defined]  # extra to the client


@pytest.mark.parametrize("tokens_a_step", [1, 7, 1000])
async def test_a_stream_ends_in_the_response_that_its_events_build(tokens_a_step: int) -> None:
    async with (
        openai_client(thinking(tokens_a_step=tokens_a_step)) as client,
        client.responses.stream(model="fake-model", input="hi", tools=TOOLS) as stream,
    ):
        events = [event async for event in stream]
        built = await stream.get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in built.output] == ["reasoning", "message", *["function_call"] * 2]
    assert built.output[0].content[0].text == "Where? 1 < 2."  # type: ignore[union-attr,index]
    assert built.output_text == "Let me look."
    calls = [(i.name, i.arguments) for i in built.output if i.type == "function_call"]
    assert calls == CALLS
    assert all(item.status == "completed" for item in built.output)
    told = {
        "reasoning": "".join(e.delta for e in events if e.type == "response.reasoning_text.delta"),
        "text": "".join(e.delta for e in events if e.type == "response.output_text.delta"),
        "calls": [
            "".join(
                e.delta
                for e in events
                if e.type == "response.function_call_arguments.delta" and e.output_index == index
            )
            for index in (2, 3)
        ],
    }
    assert told == {
        "reasoning": "Where? 1 < 2.",
        "text": "Let me look.",
        "calls": [arguments for _, arguments in CALLS],
    }
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    done = [e.item.id for e in events if e.type == "response.output_item.done"]
    assert added == done == [item.id for item in built.output]


async def test_whole_and_streamed_answers_have_the_same_items() -> None:
    whole = await created(thinking(), tools=TOOLS)
    shape = [(i["type"], i.get("arguments"), i.get("content")) for i in whole["output"]]
    assert shape[1:] == [
        (
            "message",
            None,
            [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
        ),
        *(("function_call", arguments, None) for _, arguments in CALLS),
    ]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    response = await created(replying(), max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize("text", ["", "\n \n"])
async def test_an_answer_without_text_has_a_message_all_the_same(text: str) -> None:
    response = await created(replying(text))
    (item,) = response["output"]
    assert item["content"][0]["text"] == text


async def test_log_probabilities_come_with_the_text() -> None:
    include = ["message.output_text.logprobs"]
    response = await created(replying("Oh"), include=include, top_logprobs=2)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert [position["token"] for position in logprobs][:2] == ["O", "h"]
    assert len(logprobs[0]["top_logprobs"]) == 2


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    engine = replying(fail_after=3)
    async with openai_client(engine) as client:
        stream = await client.responses.create(model="fake-model", input="hi", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "the engine is gone"


async def test_a_failure_before_the_answer_has_its_own_status() -> None:
    async with openai_client(replying(fail_after=0)) as client:
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="fake-model", input="hi", stream=True)


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Look it up."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "9"},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "Nine."}]},
        {"type": "message", "role": "assistant", "content": "Or ten."},
        {"role": "developer", "content": "Be brief."},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert messages_of("Help.", items) == [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "reasoning_content": "Look it up.",
         "tool_calls": [{"id": "c1", **call}, {"id": "c2", **call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
        {"role": "assistant", "content": [{"type": "text", "text": "Nine."}]},
        {"role": "assistant", "content": "Or ten."},
        {"role": "developer", "content": "Be brief."},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "king", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "hi"}, CALL, CALL | {"arguments": "{"}]},
         "input[2].arguments"),
        ({"instructions": "Help.", "input": [CALL | {"arguments": "[,]"}]}, "input[0].arguments"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 7}}, "metadata.k"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
         "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": 7}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"messages": [{}]}, "messages"),
        ({"n": 2}, "n"),
        ({"reasoning": {"effort": 7}}, "reasoning.effort"),
    ],
)  # fmt: skip
async def test_what_cant_be_served_is_named_as_it_was_sent(body: Any, param: str) -> None:
    assert await refused(**body) == (400, param)


async def test_a_wrong_tool_choice_is_told_what_this_endpoint_takes() -> None:
    async with openai_client(replying("")) as client:
        with pytest.raises(openai.BadRequestError, match=r"\{'type': 'function', 'name': \.\.\.\}"):
            await client.responses.create(
                model="fake-model",
                input="Hi",
                tool_choice={"type": "function", "function": {"name": "f"}},  # type: ignore[call-overload]
            )


async def test_metadata_within_openais_limits_comes_back() -> None:
    metadata = {f"{n:064}": "v" * 512 for n in range(16)}
    assert (await created(thinking(), metadata=metadata))["metadata"] == metadata


async def test_a_conversation_goes_on_from_a_kept_answer() -> None:
    engine = replying("Paris.")
    async with openai_client(engine, response_store=100_000) as client:
        first = await client.responses.create(
            model="fake-model", input="Capital?", instructions="Be brief."
        )
        second = await client.responses.create(
            model="fake-model", input="Sure?", previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        prompt = " ".join(map(str, engine.requests[1].prompt_token_ids))
        for text, told in [("Capital?", True), ("Paris.", True), ("Be brief.", False)]:
            assert (" ".join(map(str, ids_of(text))) in prompt) is told
        again = await client.responses.retrieve(second.id)
        assert again.output_text == "Paris."
        items = await client.responses.input_items.list(second.id)
        assert [item.type for item in items.data] == ["message", "message", "message"]
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(
                model="fake-model", input="x", previous_response_id=second.id
            )
        assert unknown.value.param == "previous_response_id"


async def test_a_stream_is_kept_too_and_store_false_is_not() -> None:
    async with openai_client(replying(), response_store=100_000) as client:
        stream = await client.responses.create(model="fake-model", input="hi", stream=True)
        last = [event async for event in stream][-1]
        assert (await client.responses.retrieve(last.response.id)).output_text == "Hello, world!"
        unkept = await client.responses.create(model="fake-model", input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


async def test_items_are_counted_from_the_requests_own_first_one() -> None:
    serving = await make_serving(thinking(), response_store=1 << 20)
    async with http_client(serving) as http:
        kept = (await http.post("/v1/responses", json={"input": "hi"})).json()
        body = {"previous_response_id": kept["id"], "input": [CALL | {"arguments": "{"}]}
        answer = await http.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].arguments")


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3", "stream=1"])
async def test_a_kept_answer_is_not_streamed_again(query: str) -> None:
    async with http_client(await make_serving(replying(), response_store=1 << 20)) as http:
        kept = (await http.post("/v1/responses", json={"input": "hi"})).json()
        answer = await http.get(f"/v1/responses/{kept['id']}?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]
        answer = await http.get(f"/v1/responses/{kept['id']}?stream=false")
        assert answer.json() == kept


async def test_another_tenant_sees_nothing() -> None:
    serving = await make_serving(replying(), response_store=100_000, api_key="a,b")
    async with http_client(serving) as http:
        made = await http.post(
            "/v1/responses", json={"input": "hi"}, headers={"authorization": "Bearer a"}
        )
        path = f"/v1/responses/{made.json()['id']}"
        for method in ("GET", "DELETE"):
            other = await http.request(method, path, headers={"authorization": "Bearer b"})
            assert other.status_code == 404
        assert (await http.get(path, headers={"authorization": "Bearer a"})).status_code == 200


def test_the_store_forgets_the_oldest_and_never_holds_more_than_it_may() -> None:
    store = ResponseStore(1000)
    for number in range(20):
        store.add("t", StoredResponse({"id": f"r{number}", "text": "x" * 200}, []))
    kept = [n for n in range(20) if ("t", f"r{n}") in store._kept]
    assert kept == [16, 17, 18, 19]
    store.add("t", StoredResponse({"id": "huge", "text": "x" * 2000}, []))
    assert ("t", "huge") not in store._kept
    for number in kept:
        store.delete("t", f"r{number}")
    assert store._num_bytes == 0


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "body",
    [
        {"text": {"format": {"type": "text", "extra": _nested(400)}}},
        {"input": [{"role": "user", "content": "hi", "extra": _nested(400)}], "store": True},
    ],
    ids=["text", "input"],
)
async def test_what_could_not_be_sent_back_is_refused_before_anything_runs(
    body: dict[str, Any],
) -> None:
    engine = replying()
    async with http_client(await make_serving(engine, response_store=10)) as http:
        answer = await http.post("/v1/responses", json={"input": "hi", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert engine.requests == []


async def test_an_answer_larger_than_the_store_says_that_it_is_not_kept() -> None:
    async with http_client(await make_serving(replying(), response_store=2000)) as http:
        body = {"input": "hi", "store": True, "metadata": {str(n): "x" * 500 for n in range(6)}}
        answer = (await http.post("/v1/responses", json=body)).json()
        assert answer["store"] is False
        assert (await http.get(f"/v1/responses/{answer['id']}")).status_code == 404
