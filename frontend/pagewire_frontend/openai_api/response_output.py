"""The output of a response: items, and the events by which they come."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from pagewire.outputs import FinishReason
from pagewire_frontend.answers import ToolCallDelta
from pagewire_frontend.generation_types import TextDelta
from pagewire_frontend.openai_api.logprobs import chat_logprobs


class OutputItems:
    """Builds the items of one answer from its deltas.

    `take_events` gives what there is to tell of them; whoever does not stream leaves it be.

    Args:
        with_logprobs: texts carry log probabilities.

    Attributes:
        items: all so far; the last one may be incomplete.
        reasoning_tokens: tokens that were reasoning alone.
        finish_reason: None while it goes on.
    """

    def __init__(self, *, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._with_logprobs = with_logprobs
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._white_space = ""

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and fields of the events since the last call."""
        events, self._events = self._events, []
        return events

    def advance(self, delta: TextDelta) -> None:
        """Takes in what is new."""
        if delta.reasoning:
            if not delta.text and not delta.tool_calls:
                self.reasoning_tokens += len(delta.token_ids)
            self._open_text("reasoning")
            self._add_text("response.reasoning_text.delta", delta.reasoning)
        if delta.text:
            self._add_content(delta)
        for call in delta.tool_calls:
            self._add_call(call)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if not self.items:
                self._open_text("message")
                self._add_text("response.output_text.delta", self._white_space)
            self._close("incomplete" if self._is_cut else "completed")

    @property
    def _is_cut(self) -> bool:
        return self.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS)

    def _add_content(self, delta: TextDelta) -> None:
        text = self._white_space + delta.text
        if not self._is_open("message") and not text.strip():
            self._white_space = text  # what stands around reasoning and calls is no message
            return
        self._white_space = ""
        self._open_text("message")
        logprobs = chat_logprobs(delta.logprobs)["content"] if self._with_logprobs else []
        self._logprobs += logprobs
        self._add_text("response.output_text.delta", text, logprobs=logprobs)

    def _add_text(self, event: str, text: str, **fields: Any) -> None:
        if text:
            self._text.append(text)
            self._tell(event, content_index=0, delta=text, **fields)

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.name:
            self._open(
                {
                    "id": f"fc_{secrets.token_hex(16)}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": "",
                }
            )
        if call.arguments:
            self._text.append(call.arguments)
            self._tell("response.function_call_arguments.delta", delta=call.arguments)

    def _open_text(self, kind: str) -> None:
        if self._is_open(kind):
            return
        prefix = "msg" if kind == "message" else "rs"
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind}
        item |= {"status": "in_progress", "content": []}
        if kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
        self._open(item)
        self._tell("response.content_part.added", content_index=0, part=self._part("", []))

    def _is_open(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1]["type"] == kind

    def _open(self, item: dict[str, Any]) -> None:
        self._close("completed")
        self.items.append(item)
        self._event("response.output_item.added", item=dict(item))

    def _close(self, status: str) -> None:
        """Completes the last item, if there is one."""
        if not self.items:
            return
        item = self.items[-1]
        text, logprobs = "".join(self._text), self._logprobs
        self._text, self._logprobs = [], []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            self._tell("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text, logprobs)
            item["content"] = [part]
            if item["type"] == "message":
                told = {"text": text, "logprobs": logprobs}
                self._tell("response.output_text.done", content_index=0, **told)
            else:
                self._tell("response.reasoning_text.done", content_index=0, text=text)
            self._tell("response.content_part.done", content_index=0, part=part)
        self._event("response.output_item.done", item=dict(item))

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _tell(self, event: str, **fields: Any) -> None:
        self._event(event, item_id=self.items[-1]["id"], **fields)

    def _event(self, event: str, **fields: Any) -> None:
        self._events.append((event, {"output_index": len(self.items) - 1, **fields}))


class EventWriter:
    """Numbers a stream's events and writes them as server-sent ones."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, event: str, fields: dict[str, Any]) -> bytes:
        """One event."""
        data = orjson.dumps({"type": event, "sequence_number": self._next, **fields})
        self._next += 1
        return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"
