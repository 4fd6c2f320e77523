"""Thirty-two streams of all kinds at once, over gRPC and over HTTP, and what came of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

from pagewire.v1 import inference_pb2, inference_pb2_grpc

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 6, "maxLength": 10},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 10, "maximum": 99},
            "minItems": 3,
            "maxItems": 5,
        },
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
TOOL = {"name": "look_up", "description": "Looks things up.", "parameters": SCHEMA}
PROMPTS = ("Tell me of ships.", "Once upon a time", "The numbers are", "A list of towns:")
NEVER = "~~~~ never ~~~~"
CUT_OFF = "the stream was cut off"


@dataclass(frozen=True)
class Case:
    """One request, in the fields that both APIs share.

    Attributes:
        is_chat: else a completion.
        over_http: else over gRPC.
        sampling: fields of the sampling parameters.
        regex, schema: a constraint on the output.
        tool_choice: of a chat with a tool: "required", or "look_up" by name.
        adapter: the LoRA to use.
    """

    name: str
    prompt: str
    is_chat: bool
    over_http: bool
    sampling: dict[str, Any]
    regex: str = ""
    schema: dict[str, Any] | None = None
    tool_choice: str = ""
    adapter: str = ""
    stop: str = ""


def mixed_cases(max_tokens: int, adapters: Sequence[str]) -> list[Case]:
    """Sixteen kinds, each over both APIs.

    Args:
        max_tokens: of each sequence; a constrained one may end earlier.
        adapters: two names.
    """
    greedy: dict[str, Any] = {"temperature": 0.0}
    first, second = adapters

    def seeded(seed: int, **fields: Any) -> dict[str, Any]:
        return {"temperature": 1.0, "seed": seed, **fields}

    text: dict[str, dict[str, Any]] = {
        "greedy": {"sampling": greedy},
        "seeded": {"sampling": seeded(1)},
        "three sequences": {"sampling": seeded(2, n=3)},
        "logprobs": {"sampling": greedy | {"logprobs": 2}},
        "adapter": {"sampling": greedy, "adapter": first},
        "other adapter, seeded": {"sampling": seeded(3), "adapter": second},
        "regex": {"sampling": seeded(4), "regex": "[a-z ,]{300}"},
        "schema": {"sampling": seeded(5), "schema": SCHEMA},
        "penalties": {"sampling": seeded(6, frequency_penalty=0.7, presence_penalty=0.3, top_k=40)},
        "stop string": {"sampling": greedy, "stop": NEVER},
    }
    chats: dict[str, dict[str, Any]] = {
        "chat": {"sampling": greedy},
        "chat of two, adapter": {"sampling": seeded(7, n=2), "adapter": first},
        "tools": {"sampling": seeded(8), "tool_choice": "required"},
        "named tool, adapter": {
            "sampling": seeded(9),
            "tool_choice": "look_up",
            "adapter": second,
        },
        "chat schema": {"sampling": greedy, "schema": SCHEMA, "adapter": second},
        "chat logprobs": {"sampling": seeded(10, logprobs=1, top_p=0.9)},
    }
    cases = []
    for over_http in (False, True):
        for n, (name, fields) in enumerate([*text.items(), *chats.items()]):
            sampling = {"max_tokens": max_tokens, "ignore_eos": True, **fields["sampling"]}
            cases.append(
                Case(
                    name=f"{name} over {'HTTP' if over_http else 'gRPC'}",
                    prompt=PROMPTS[n % len(PROMPTS)],
                    is_chat=name in chats,
                    over_http=over_http,
                    **{**fields, "sampling": sampling},
                )
            )
    return cases


@dataclass
class Answer:
    """What a client has read.

    Attributes:
        texts, token_ids, logprobs: by the index of the sequence.
        calls: (name, arguments) by (sequence, call).
        endings: finish reasons by sequence.
        usage: prompt and completion tokens.
        resumptions: as the last message tells.
        messages: how many came.
        error: the status it ended with, "" where all is well.
    """

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    calls: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    endings: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    resumptions: int = 0
    messages: int = 0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))

    def add(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Takes what is new of a sequence."""
        assert index not in self.endings, "something came after the end"
        self.texts[index] = self.texts.get(index, "") + text
        self.token_ids.setdefault(index, []).extend(token_ids)
        self.logprobs.setdefault(index, []).extend(logprobs)

    def add_call(self, index: int, call: int, name: str, arguments: str) -> None:
        """Takes what is new of a tool call."""
        known = self.calls.get((index, call), ("", ""))
        self.calls[index, call] = (known[0] + name, known[1] + arguments)

    def assert_begins(self, other: Answer, name: str) -> None:
        """What has come is the beginning of the other."""
        for index, token_ids in self.token_ids.items():
            assert token_ids == other.token_ids[index][: len(token_ids)], name
            assert other.texts[index].startswith(self.texts[index]), name
        for key, (function, arguments) in self.calls.items():
            assert other.calls[key][0] == function, name
            assert other.calls[key][1].startswith(arguments), name

    def assert_equals(self, other: Answer, name: str) -> None:
        """Token for token, text for text."""
        assert self.error == "", f"{name}: {self.error}"
        assert self.token_ids == other.token_ids, name
        assert self.texts == other.texts, name
        assert self.calls == other.calls, name
        assert self.endings == other.endings, name
        assert self.usage == other.usage, name
        assert self.logprobs.keys() == other.logprobs.keys(), name
        for index, values in self.logprobs.items():
            assert values == pytest.approx(other.logprobs[index], abs=1e-4), name


class MixedStreams:
    """Runs cases against a frontend, all at once.

    Args:
        cases: what to ask.
        http: URL of the HTTP API.
        target: of the gRPC API.
        new_answer: makes what collects an answer.

    Attributes:
        answers: what has come so far, by the case's name.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        http: str,
        target: str,
        new_answer: Callable[[], Answer] = Answer,
    ) -> None:
        self._cases = cases
        self._http = http
        self._target = target
        self.answers = {case.name: new_answer() for case in cases}

    async def run(self) -> dict[str, Answer]:
        """All answers, whole or broken off."""
        limits = httpx.Limits(max_connections=None)
        async with (
            grpc.aio.insecure_channel(self._target) as channel,
            httpx.AsyncClient(trust_env=False, limits=limits, timeout=None) as client,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(
                *(
                    read_over_http(client, self._http, case, self.answers[case.name])
                    if case.over_http
                    else read_over_grpc(stub, case, self.answers[case.name])
                    for case in self._cases
                )
            )
        return self.answers


def grpc_request(case: Case) -> inference_pb2.GenerateRequest | inference_pb2.ChatRequest:
    """The case as a message."""
    sampling = dict(case.sampling)
    if case.regex:
        sampling["structured_output"] = {"regex": case.regex}
    if case.schema is not None:
        sampling["structured_output"] = {"json_schema": json.dumps(case.schema)}
    shared = {"model": case.adapter, "sampling_params": sampling}
    if case.stop:
        shared["text_params"] = {"stop": [case.stop]}
    if not case.is_chat:
        return inference_pb2.GenerateRequest(text=case.prompt, **shared)
    message = {"role": "user", "content": [{"text": case.prompt}]}
    request = inference_pb2.ChatRequest(messages=[message], **shared)
    if case.tool_choice:
        request.tools.add(
            name=TOOL["name"],
            description=TOOL["description"],
            parameters_json=json.dumps(TOOL["parameters"]),
            strict=True,
        )
        if case.tool_choice == "required":
            request.tool_choice.mode = inference_pb2.ToolChoice.MODE_REQUIRED
        else:
            request.tool_choice.name = case.tool_choice
    return request


async def read_over_grpc(
    stub: Any, case: Case, answer: Answer, timeout_s: float | None = None
) -> None:
    """Reads a case's stream to its end."""
    method = stub.Chat if case.is_chat else stub.Generate
    try:
        async for message in method(grpc_request(case), timeout=timeout_s):
            take_message(message, answer)
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"


def take_message(message: Any, answer: Answer) -> None:
    """One message of a stream."""
    answer.messages += 1
    is_chat = isinstance(message, inference_pb2.ChatResponse)
    for output in message.choices if is_chat else message.outputs:
        logprobs = [position.token.logprob for position in output.logprobs]
        text = output.content if is_chat else output.text
        answer.add(output.index, text, output.token_ids, logprobs)
        for call in output.tool_calls if is_chat else ():
            answer.add_call(output.index, call.index, call.name, call.arguments)
        if output.finish_reason:
            name = type(output).DESCRIPTOR.fields_by_name["finish_reason"].enum_type
            reason = name.values_by_number[output.finish_reason].name
            answer.endings[output.index] = reason.removeprefix("FINISH_REASON_").lower()
    if message.HasField("usage"):
        answer.usage = (message.usage.prompt_tokens, message.usage.completion_tokens)
        answer.resumptions = message.usage.resumptions


def http_body(case: Case) -> dict[str, Any]:
    """The case as JSON."""
    body = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **case.sampling,
    }
    logprobs = body.pop("logprobs", None)
    if case.adapter:
        body["model"] = case.adapter
    if case.regex:
        body["structured_outputs"] = {"regex": case.regex}
    if case.schema is not None:
        body["structured_outputs"] = {"json": case.schema}
    if case.stop:
        body["stop"] = case.stop
    if not case.is_chat:
        return body | {"prompt": case.prompt} | ({"logprobs": logprobs} if logprobs else {})
    body["messages"] = [{"role": "user", "content": case.prompt}]
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    if case.tool_choice:
        body["tools"] = [{"type": "function", "function": TOOL | {"strict": True}}]
        body["tool_choice"] = (
            "required"
            if case.tool_choice == "required"
            else {"type": "function", "function": {"name": case.tool_choice}}
        )
    return body


async def read_over_http(client: httpx.AsyncClient, url: str, case: Case, answer: Answer) -> None:
    """Reads a case's events to their end."""
    path = "/v1/chat/completions" if case.is_chat else "/v1/completions"
    async with client.stream("POST", url + path, json=http_body(case)) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
            return
        done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                assert not done, "something came after the end"
                take_event(json.loads(line.removeprefix("data: ")), answer)
        if not done and not answer.error:
            answer.error = CUT_OFF


def take_event(event: dict[str, Any], answer: Answer) -> None:
    """One event of a stream."""
    answer.messages += 1
    if "error" in event:
        answer.error = f"{event['error'].get('code')}: {event['error']['message']}"
        return
    for choice in event["choices"]:
        index = choice["index"]
        delta = choice.get("delta", {})
        text = (delta.get("content") or "") if "delta" in choice else choice["text"]
        token_ids = choice.get("token_ids") or ()
        answer.add(index, text, token_ids, list(_logprobs(choice.get("logprobs"))))
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            answer.add_call(index, call["index"], name, arguments)
        if choice["finish_reason"]:
            answer.endings[index] = choice["finish_reason"]
    if event.get("usage"):
        usage = event["usage"]
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        answer.resumptions = event["metrics"]["resumptions"]


def _logprobs(told: dict[str, Any] | None) -> Iterator[float]:
    if told is None:
        return
    if "content" in told:
        yield from (position["logprob"] for position in told["content"] or ())
    else:
        yield from told["token_logprobs"]
