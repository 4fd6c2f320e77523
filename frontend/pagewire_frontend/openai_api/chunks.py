"""Response JSON that is written over and over: by template and orjson, 0.1 us a chunk where
pydantic takes 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pagewire.outputs import FinishReason
from pagewire_frontend.answers import ToolCall, ToolCallDelta
from pagewire_frontend.metered_generation import Usage

FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class CallShape:
    """How the calls of an answer are told to a client, which knows one shape of them.

    Attributes:
        finish_names: what the reasons for an end are called.
        delta: what is new of calls, as fields of a delta.
        whole: calls, as fields of a message.
    """

    finish_names: Mapping[FinishReason, str]
    delta: Callable[[Sequence[ToolCallDelta]], dict[str, Any]]
    whole: Callable[[Sequence[ToolCall]], dict[str, Any]]


_PLAIN = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'


class ChunkFormat:
    """Writes the `data:` events of one stream.

    Args:
        object_name: "chat.completion.chunk" or "text_completion".
        response_id, model: the same in each chunk.
        created: Unix time, seconds.
        num_choices: choice indexes below this will be asked for.
        include_usage: every chunk gets `"usage": null`, as OpenAI's do where the last has one.
        finish_names: what the reasons for an end are called.
    """

    def __init__(
        self,
        *,
        object_name: str,
        response_id: str,
        created: int,
        model: str,
        num_choices: int,
        include_usage: bool,
        finish_names: Mapping[FinishReason, str] = FINISH_NAMES,
    ) -> None:
        self._finish_names = finish_names
        head = orjson.dumps(
            {"id": response_id, "object": object_name, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._is_chat = object_name.startswith("chat")
        key = b'"delta":{"content":' if self._is_chat else b'"text":'
        self._choice_heads = [self._head + b'{"index":%d,' % index for index in range(num_choices)]
        self._text_heads = [head + key for head in self._choice_heads]
        self._end = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._text_tail = (b"}" if self._is_chat else b"") + _PLAIN + self._end
        self._include_usage = include_usage

    def text(self, index: int, text: str) -> bytes:
        """A chunk with new text and nothing else: the usual case."""
        return self._text_heads[index] + orjson.dumps(text) + self._text_tail

    def choice(
        self,
        index: int,
        delta: str | dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        prompt_token_ids: list[int] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        """A chunk with all there is. `delta` is the text of a completion, or a chat's delta. The
        prompt's ids are a completion's choice's, and a chat's chunk's, as in vLLM."""
        fields: dict[str, Any] = {
            "delta" if self._is_chat else "text": delta,
            "logprobs": logprobs,
            "finish_reason": None if finish_reason is None else self._finish_names[finish_reason],
            "stop_reason": stop_reason,
        }
        if token_ids is not None:
            fields["token_ids"] = token_ids
        tail = b"]"
        if prompt_token_ids is not None:
            if self._is_chat:
                tail += b',"prompt_token_ids":' + orjson.dumps(prompt_token_ids)
            else:
                fields["prompt_token_ids"] = prompt_token_ids
        return self._choice_heads[index] + orjson.dumps(fields)[1:] + tail + self._end

    def usage(self, usage: Usage) -> bytes:
        """The chunk before `[DONE]`, where it was asked for; else nothing."""
        if not self._include_usage:
            return b""
        block = orjson.dumps(usage_block(usage))
        metrics = orjson.dumps(metrics_block(usage))
        return self._head + b'],"usage":' + block + b',"metrics":' + metrics + b"}\n\n"


def reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning in a message or a delta: under the name that most clients read and the one that
    vLLM has moved to."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


TOOL_CALLS = CallShape(
    FINISH_NAMES,
    delta=lambda calls: {"tool_calls": list(map(_call_delta, calls))},
    whole=lambda calls: {"tool_calls": list(map(_whole_call, calls))},
)


def usage_block(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    completion = usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": usage.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": usage.times.cached_tokens},
    }


def metrics_block(usage: Usage) -> dict[str, Any]:
    """The seconds of each phase, beside `usage`: clients that add up the numbers of `usage` must
    find nothing else there."""
    times = usage.times
    return {
        "queue_s": times.queue_s,
        "prefill_s": times.prefill_s,
        "decode_s": times.decode_s,
        "time_to_first_token_s": usage.first_token_s,
        "total_s": usage.total_s,
        "steps": times.steps,
        "step_s": times.step_s,
        "preemptions": times.preemptions,
        "resumptions": times.resumptions,
    }
