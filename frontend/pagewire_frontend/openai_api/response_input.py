"""What /v1/responses takes, as the chat that it means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire_frontend.openai_api.body_reading import validated
from pagewire_frontend.openai_api.field_types import Numbers, Objects, Texts
from pagewire_frontend.openai_api.requests import ChatBody
from pagewire_frontend.openai_api.unsupported import IN_RESPONSES, Refused

LOGPROBS = "message.output_text.logprobs"
# The second asks for what only a server that hides its reasoning has.
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
# What has the same name and meaning in a chat.
_SHARED = (
    "model", "temperature", "top_p", "parallel_tool_calls", "user", "seed", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p",
    "min_tokens", "ignore_eos", "skip_special_tokens", "priority", "include_reasoning",
    "thinking_token_budget", "chat_template", "chat_template_kwargs", "fit_max_tokens",
)  # fmt: skip
_CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_ALLOWED_TOOLS = "tool_choice.allowed_tools"  # one level deeper in a chat
# OpenAI's limits.
_MOST_METADATA = 16
_LONGEST_KEY = 64
_LONGEST_VALUE = 512
_PLACE = re.compile(r"messages\[\d+\](\.tool_calls\[\d+\])?")
# Parts of a message or of an item that are text; each has it as `text` but for a refusal.
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ResponsesBody(BaseModel):
    """`POST /v1/responses`, with the extensions of chats."""

    model_config = ConfigDict(strict=True, extra="ignore")
    refused: ClassVar[Refused] = IN_RESPONSES

    input: str | Objects
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Texts | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Numbers | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    fit_max_tokens: bool | None = None
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """The input as items, even where it is a text."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def text_format(self) -> dict[str, Any]:
        """`text.format`, plain text where there is none."""
        given = (self.text or {}).get("format")
        return {"type": "text"} if given is None else given

    def chat(self, earlier_items: Sequence[Mapping[str, Any]]) -> ChatBody:
        """The chat that this means.

        Args:
            earlier_items: of the conversation that it goes on with.

        Raises:
            InvalidArgumentError: something can't be served; it is named as it is here.
        """
        self._check()
        chat: dict[str, Any] = {
            name: value for name in _SHARED if (value := getattr(self, name)) is not None
        }
        items = [*earlier_items, *self.input_items]
        chat["messages"] = messages_of(
            self.instructions, items, num_earlier=len(earlier_items), origins=self._origins
        )
        chat |= {
            name: value
            for name, value in (
                ("max_completion_tokens", self.max_output_tokens),
                ("reasoning_effort", (self.reasoning or {}).get("effort")),
                ("tools", None if self.tools is None else list(map(_chat_tool, self.tools))),
                ("tool_choice", _chat_tool_choice(self.tool_choice)),
                ("response_format", _chat_response_format(self.text_format)),
            )
            if value is not None
        }
        if self.with_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        with self.in_our_words():
            return validated(chat, ChatBody)

    @contextmanager
    def in_our_words(self) -> Iterator[None]:
        """Errors that the chat of this would name name what this endpoint calls so."""
        try:
            yield
        except PagewireError as error:
            error.field = self.our_name(error.field)
            raise

    def our_name(self, field: str) -> str:
        """What a field of the chat of this is called here."""
        if place := _PLACE.match(field):
            # Of a call's place, else of its message's.
            for known in (place[0], place[0].partition(".")[0]):
                if known in self._origins:
                    rest = field.removeprefix(known)
                    return self._origins[known] + rest.replace(".function.", ".")
        if field.startswith(("messages", "prompt")):
            return "input"
        if field.startswith("response_format"):
            rest = field.removeprefix("response_format").removeprefix(".json_schema")
            return f"text.format{rest}"
        if field.startswith(_ALLOWED_TOOLS):
            field = field.replace(_ALLOWED_TOOLS, "tool_choice", 1)
        return _CHAT_NAMES.get(field, field).replace(".function.", ".")

    def _check(self) -> None:
        _check_metadata(self.metadata or {})
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise InvalidArgumentError("include", f"{name!r:.80} is not supported")
        if self.top_logprobs and not self.with_logprobs:
            raise InvalidArgumentError("top_logprobs", f"needs include=[{LOGPROBS!r}]")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            # Here, where no prompt is scored alone.
            raise InvalidArgumentError(
                "max_output_tokens", f"must be at least 1, not {self.max_output_tokens}"
            )
        if self.truncation not in (None, "disabled"):
            raise InvalidArgumentError(
                "truncation", "must be 'disabled': a conversation that is too long is refused"
            )
        verbosity = (self.text or {}).get("verbosity")
        if verbosity not in (None, "medium"):
            raise InvalidArgumentError(
                "text.verbosity",
                "is not supported by this server: say in a message how long the answer is to be",
            )


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > _MOST_METADATA:
        raise InvalidArgumentError(
            "metadata", f"has {len(metadata)} keys; at most {_MOST_METADATA} are allowed"
        )
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY:
            raise InvalidArgumentError(
                "metadata",
                f"the key {key!r:.80} has {len(key)} characters; {_LONGEST_KEY} are allowed",
            )
        if not isinstance(value, str):
            raise InvalidArgumentError(f"metadata.{key}", "must be a string")
        if len(value) > _LONGEST_VALUE:
            raise InvalidArgumentError(
                f"metadata.{key}",
                f"has {len(value)} characters; at most {_LONGEST_VALUE} are allowed",
            )


def messages_of(
    instructions: str | None,
    items: Sequence[Mapping[str, Any]],
    *,
    num_earlier: int = 0,
    origins: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A chat's messages of a conversation's items.

    What an assistant did in a row, reasoning, text and calls, becomes one message.

    Args:
        instructions: go before them.
        items: of the conversation.
        num_earlier: items that are kept ones, and not the request's.
        origins: is filled with what the request calls each message and call.

    Raises:
        InvalidArgumentError: an item is not one, or of a kind that is not served.
    """
    messages: list[dict[str, Any]] = []
    origins = {} if origins is None else origins
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        origins["messages[0]"] = "instructions"
    for index, item in enumerate(items):
        where = "previous_response_id" if index < num_earlier else f"input[{index - num_earlier}]"
        _ITEMS.get(_kind(item), _refuse_item)(item, where, messages)
        place = f"messages[{len(messages) - 1}]"
        origins.setdefault(place, where)
        if _kind(item) == "function_call":
            origins[f"{place}.tool_calls[{len(messages[-1]['tool_calls']) - 1}]"] = where
    return messages


def _kind(item: Mapping[str, Any]) -> Any:
    return item.get("type") or ("message" if "role" in item else None)


def _add_message(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    role = item.get("role")
    content = _texts(item.get("content"), f"{where}.content")
    if role == "assistant":
        message = _assistant_turn(messages, "content", "tool_calls")
        message["content"] = content
        return
    messages.append({"role": role, "content": content})


def _add_reasoning(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    parts = _texts(item.get("content") or item.get("summary") or [], f"{where}.content")
    message = _assistant_turn(messages, "content", "tool_calls", "reasoning_content")
    message["reasoning_content"] = (
        parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
    )


def _add_call(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise InvalidArgumentError(f"{where}.{name}", "is required, and must be a string")
    message = _assistant_turn(messages)
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)


def _add_output(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    if not isinstance(item.get("call_id"), str):
        raise InvalidArgumentError(f"{where}.call_id", "is required, and must be a string")
    content = _texts(item.get("output"), f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def _refuse_item(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    raise InvalidArgumentError(
        f"{where}.type", f"must be one of {', '.join(_ITEMS)}, not {item.get('type')!r:.80}"
    )


_ITEMS: dict[Any, Callable[[Mapping[str, Any], str, list[dict[str, Any]]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _assistant_turn(messages: list[dict[str, Any]], *new: str) -> dict[str, Any]:
    """The assistant's message that goes on, or another one where it has one of `new` already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in new):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _texts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgumentError(where, "must be a string or a list of parts")
    return [_text_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _text_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
        raise InvalidArgumentError(f"{where}.type", f"must be a kind of text, not {kind!r:.80}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{where}.text", "must be a string")
    return {"type": "text", "text": text}


def _chat_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    # Other kinds are refused where chats refuse them.
    if tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


def _chat_tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": _chat_allowed_tools(choice)}
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidArgumentError(
            "tool_choice",
            "must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
            "{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _chat_allowed_tools(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    # What is wrong in it is refused where chats refuse it.
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [
            {"type": tool.get("type"), "function": {"name": tool.get("name")}}
            if isinstance(tool, Mapping)
            else tool
            for tool in tools
        ]
    return {"mode": choice.get("mode"), "tools": tools}


def _chat_response_format(text_format: Any) -> Any:
    if not isinstance(text_format, Mapping):
        raise InvalidArgumentError("text.format", "must be an object")
    if text_format.get("type") != "json_schema":
        return text_format
    names = ("name", "schema", "strict")
    return {
        "type": "json_schema",
        "json_schema": {name: text_format.get(name) for name in names},
    }
