"""What the gRPC streams put into messages, and how large these get."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.grpc_api import responses, streams
from pagewire_frontend.grpc_api.inference import InferenceServicer
from pagewire_frontend.grpc_api.requests import template_arguments, tool_definitions
from tests.fakes.fake_engine_client import EOS_ID, MODEL, FakeEngineClient, ids_of
from tests.fakes.frontend import chat_request, make_serving

# In place of the real budget, so that the test need not build megabytes.
BUDGET = 32_000


def test_the_budget_leaves_room_below_the_clients_default_limit() -> None:
    # A message ends at the first position beyond the budget, and what is not logprobs comes on top.
    assert responses.MESSAGE_BUDGET <= (4 << 20) - (1 << 20)


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MESSAGE_BUDGET", BUDGET)
    monkeypatch.setattr(streams, "MESSAGE_BUDGET", BUDGET)


class Context:
    """Keeps what is written, as the wire would: serialised at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.messages: list[Any] = []

    def invocation_metadata(self) -> tuple[()]:
        """None came with the call."""
        return ()

    async def write(self, message: Any) -> None:
        data = message.SerializeToString()
        self.sizes.append(len(data))
        self.messages.append(type(message).FromString(data))


async def stream(client: FakeEngineClient, method: str, request: Any) -> Context:
    context = Context()
    servicer = InferenceServicer(await make_serving(client))
    await getattr(servicer, method)(request, context)
    return context


async def test_chat_messages_carry_what_is_new_and_usage_comes_last() -> None:
    client = FakeEngineClient(tokens_a_step=2)
    context = await stream(client, "Chat", chat_request(request_id="mine"))
    messages = context.messages
    assert {(message.request_id, message.model) for message in messages} == {("mine", MODEL)}
    assert "".join(message.choices[0].content for message in messages) == "Hello, world!"
    ids = [i for message in messages for i in message.choices[0].token_ids]
    assert ids == [*ids_of("Hello, world!"), EOS_ID]
    assert [message.HasField("usage") for message in messages] == [False] * 6 + [True]
    assert messages[-1].choices[0].finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert messages[-1].usage.completion_tokens == 14
    usage = messages[-1].usage
    assert usage.total_s >= usage.time_to_first_token_s > 0
    assert (usage.queue_s, usage.prefill_s, usage.steps) == (0.25, 0.5, 7)
    assert usage.cached_tokens == 1
    assert usage.step_time_s == 0.5 + usage.decode_s > 0.5


async def test_a_stop_string_leaves_no_time_out() -> None:
    client = FakeEngineClient(delay_s=0.002)
    request = chat_request(text_params={"stop": ["wor"]})
    usage = (await stream(client, "Chat", request)).messages[-1].usage
    assert usage.completion_tokens == 10
    assert (usage.queue_s, usage.prefill_s, usage.steps) == (0.25, 0.5, 10)
    assert usage.step_time_s == 0.5 + usage.decode_s > 0.5 + 9 * 0.002


async def test_generate_tells_sequences_apart_and_why_they_stopped() -> None:
    client = FakeEngineClient(reply=lambda request, index: ["abc", "xyz"][index])
    request = inference_pb2.GenerateRequest(
        text="p", sampling_params={"n": 2}, text_params={"stop": ["y"]}
    )
    context = await stream(client, "Generate", request)
    texts = {0: "", 1: ""}
    ends = {}
    for message in context.messages:
        for output in message.outputs:
            texts[output.index] += output.text
            if output.finish_reason:
                ends[output.index] = (output.finish_reason, output.stop_string)
    assert texts == {0: "abc", 1: "x"}
    stop = sampling_pb2.FINISH_REASON_STOP
    assert ends == {0: (stop, ""), 1: (stop, "y")}


@pytest.mark.usefixtures("small_budget")
async def test_long_prompt_logprobs_come_in_several_messages() -> None:
    client = FakeEngineClient(max_model_len=40_000)
    prompt = [i % 256 for i in range(600)]
    request = inference_pb2.GenerateRequest(
        token_ids={"ids": prompt}, sampling_params={"prompt_logprobs": 20}
    )
    context = await stream(client, "Generate", request)
    positions = [position for m in context.messages for position in m.prompt_logprobs]
    assert [position.token.token_id for position in positions] == prompt[1:]
    assert all(len(position.top) == 20 for position in positions)
    assert sum(context.sizes) > 3 * BUDGET
    assert max(context.sizes) < 1.2 * BUDGET
    first_output = next(i for i, message in enumerate(context.messages) if message.outputs)
    assert not any(message.prompt_logprobs for message in context.messages[first_output:])


@pytest.mark.usefixtures("small_budget")
async def test_long_output_logprobs_of_one_turn_come_in_several_messages() -> None:
    text = "x" * 150
    client = FakeEngineClient(
        reply=lambda request, index: text, tokens_a_step=150, max_model_len=40_000
    )
    request = inference_pb2.GenerateRequest(
        text="p", sampling_params={"logprobs": 20, "max_tokens": 150, "n": 2}
    )
    context = await stream(client, "Generate", request)
    assert sum(context.sizes) > 3 * BUDGET
    assert max(context.sizes) < 1.2 * BUDGET
    for index in (0, 1):
        outputs = [o for m in context.messages for o in m.outputs if o.index == index]
        assert "".join(output.text for output in outputs) == text
        positions = [position for output in outputs for position in output.logprobs]
        assert len(positions) == 150
        assert {position.token.text for position in positions} == {"x"}
        assert [bool(output.finish_reason) for output in outputs].index(True) == len(outputs) - 1


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_long_answers_that_come_whole_come_in_several_messages(method: str) -> None:
    """As those of best_of do: one is longer than a message, and so are the others together."""
    texts = ["é" * 30_000, "ab" * 3_000, "y" * 6_000]
    client = FakeEngineClient(
        reply=lambda request, index: texts[index], tokens_a_step=60_000, max_model_len=90_000
    )
    params = {"max_tokens": 61_000, "n": 3}
    if method == "Chat":
        request = chat_request("p", sampling_params=params)
    else:
        request = inference_pb2.GenerateRequest(text="p", sampling_params=params)
    context = await stream(client, method, request)
    assert len(context.messages) > 4
    assert max(context.sizes) < 1.2 * BUDGET
    told: dict[int, list[Any]] = {}
    for message in context.messages:
        for output in message.choices if method == "Chat" else message.outputs:
            told.setdefault(output.index, []).append(output)
    for index, text in enumerate(texts):
        parts = told[index]
        content = "".join(p.content if method == "Chat" else p.text for p in parts)
        assert content == text
        assert [i for part in parts for i in part.token_ids][: len(ids_of(text))] == ids_of(text)
        assert [bool(part.finish_reason) for part in parts].index(True) == len(parts) - 1


async def test_template_arguments_reach_the_template() -> None:
    template = "{{ mood }}{{ count }}{{ messages[0].content }}"
    client = FakeEngineClient(chat_template=template)
    serving = await make_serving(client)
    request = inference_pb2.RenderChatRequest(
        messages=chat_request("hi").messages,
        template_params={"chat_template_kwargs": {"mood": "calm", "count": 3}},
    )
    rendered = await InferenceServicer(serving).RenderChat(request, Context())  # type: ignore[arg-type]  # unused
    assert rendered.prompt == "calm3hi"
    assert list(rendered.token_ids) == ids_of("calm3hi")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_lacks_is_refused_by_name(value: float) -> None:
    params = inference_pb2.ChatTemplateParams(chat_template_kwargs={"count": value})
    with pytest.raises(InvalidArgumentError) as caught:
        template_arguments(params)
    assert caught.value.field == "chat_template_kwargs"
    tool = inference_pb2.Tool(name="f", parameters={"least": value})
    with pytest.raises(InvalidArgumentError) as caught:
        tool_definitions([tool])
    assert caught.value.field == "tools[0].parameters"
