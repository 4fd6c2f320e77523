"""Answers of a given format by models that reason: the reasoning comes first, and is free."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.structured_output import StructuredOutput
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.tool_choice import ToolUse
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
)

ANSWER = '{"a": 1}'
OPENED = "{{ messages[0].content }}<think>{# </think> #}"
UNOPENED = "{{ messages[0].content }}{# <think> </think> #}"
CLOSED = "{{ messages[0].content }}<think>\n\n</think>\n\n"
PLAIN = "{{ messages[0].content }}"
CASES = [
    (OPENED, f"hm\n</think>\n\n{ANSWER}", "hm", (None, "</think>")),
    (UNOPENED, f"<think>hm</think>{ANSWER}", "hm", ("<think>", "</think>")),
    (UNOPENED, ANSWER, "", ("<think>", "</think>")),
    (CLOSED, ANSWER, "", (None, None)),
    (PLAIN, ANSWER, "", (None, None)),
]


def asked_of(client: FakeEngineClient) -> tuple[str | None, str | None]:
    constraint = client.requests[0].sampling_params.structured_output
    assert constraint is not None
    assert constraint.json_object
    return constraint.reasoning_start, constraint.reasoning_end


def engine(template: str, reply: str) -> FakeEngineClient:
    return FakeEngineClient(reply=lambda request, index: reply, chat_template=template)


@pytest.mark.parametrize(("template", "reply", "reasoning", "marks"), CASES)
async def test_over_http(
    template: str, reply: str, reasoning: str, marks: tuple[str | None, str | None]
) -> None:
    client = engine(template, reply)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_object"},
    }
    async with http_client(await make_serving(client)) as http:
        response = await http.post("/v1/chat/completions", json=body)
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    assert message["content"] == ANSWER
    assert (message.get("reasoning_content") or "") == reasoning
    assert asked_of(client) == marks


@pytest.mark.parametrize(("template", "reply", "reasoning", "marks"), CASES)
async def test_over_grpc(
    template: str, reply: str, reasoning: str, marks: tuple[str | None, str | None]
) -> None:
    client = engine(template, reply)
    request = chat_request("x")
    request.sampling_params.structured_output.json_object.SetInParent()
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        (choice,) = (await stub.ChatUnary(request)).choices
    assert choice.content == ANSWER
    assert choice.reasoning_content == reasoning
    assert asked_of(client) == marks


async def test_a_model_whose_reasoning_is_not_parsed_is_held_at_once() -> None:
    settings = GenerationSettings(reasoning_parser="none")
    generation = await Generation.create(engine(UNOPENED, ANSWER), settings)
    rendered = generation.render_chat([{"role": "user", "content": "x"}])
    assert generation.answer_format(rendered, ToolUse(), constrained=True) is None


def test_marks_are_part_of_what_is_compiled() -> None:
    held = StructuredOutput(regex="a")
    assert held != StructuredOutput(regex="a", reasoning_end="</think>")
