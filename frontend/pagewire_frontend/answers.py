"""What an answer is made of: reasoning, text and calls of tools."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# What may stand where a format has a name; wide enough for the names that MCP servers give.
TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(slots=True)
class ToolCallDelta:
    """What is new of one call.

    Attributes:
        index: which of the answer's calls, from 0 on.
        id, name: with the call's first delta, "" in the others.
        arguments: a piece of the JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ToolCall:
    """A whole call. `arguments` is JSON text as the model wrote it: it may be cut off where the
    answer was, or be wrong."""

    id: str
    name: str
    arguments: str = ""


class AnswerPieces:
    """Collects what a parser finds until it is taken.

    Args:
        make_id: of a call.
    """

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Text for the reader."""
        if text:
            self._content.append(text)

    def begin(self, name: str) -> None:
        """A call of the tool. What was told of it stays told."""
        self._calls.append(ToolCallDelta(self.num_calls, self._make_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if not text:
            return
        if not self._calls:
            self._calls.append(ToolCallDelta(self.num_calls - 1))
        self._calls[-1].arguments += text

    def take(self) -> tuple[str, list[ToolCallDelta]]:
        """What is new: content, and one delta a call."""
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls


def openai_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id in a conversation."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def to_json(value: Any) -> str:
    """JSON text of a value, on one line. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text
