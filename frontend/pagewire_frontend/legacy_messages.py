"""Messages of OpenAI's first function calls, put as tool calls: chat templates know no other.

An assistant's `function_call` becomes the one of its `tool_calls`, and the `function` message that
answers it a `tool` message. Their ids tell the place of the call alone, so that a conversation
renders alike whenever it comes again, and are nine letters and digits, as Mistral's templates want.
"""

from __future__ import annotations

from typing import Any

from pagewire.errors import InvalidArgumentError


def with_tool_calls(messages: list[Any]) -> tuple[list[Any], dict[str, str]]:
    """The messages, copied where they are legacy ones, and what the client calls the places in them
    that errors may name.

    Raises:
        InvalidArgumentError: a call is none, or stands beside calls of today.
    """
    unanswered: list[tuple[str, str]] = []  # names and ids
    names: dict[str, str] = {}
    converted: list[Any] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            converted.append(message)
        elif message.get("role") == "assistant" and message.get("function_call") is not None:
            message = _calling(message, where, f"call{index:05d}")
            (call,) = message["tool_calls"]
            unanswered.append((call["function"]["name"], call["id"]))
            place = f"{where}.tool_calls[0].function"
            names[f"{place}.arguments"] = f"{where}.function_call.arguments"
            converted.append(message)
        elif message.get("role") == "function":
            call_id = _answered_by(message, unanswered) or f"call{index:05d}"
            converted.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            converted.append(message)
    return converted, names


def _calling(message: dict[str, Any], where: str, call_id: str) -> dict[str, Any]:
    function = message["function_call"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"{where}.function_call", "must be an object with a name")
    if message.get("tool_calls"):
        raise InvalidArgumentError(
            f"{where}.function_call", "can't stand beside tool_calls, its newer name: send those"
        )
    call = {"id": call_id, "type": "function", "function": function}
    kept = {name: value for name, value in message.items() if name != "function_call"}
    return {**kept, "tool_calls": [call]}


def _answered_by(message: dict[str, Any], unanswered: list[tuple[str, str]]) -> str | None:
    """The id of the last call that waits for this answer, which waits no longer."""
    name = message.get("name")
    for at in reversed(range(len(unanswered))):
        if name in (None, unanswered[at][0]):
            return unanswered.pop(at)[1]
    return None
