"""The `messages` of a chat request, checked."""

from __future__ import annotations

from typing import Any

from pagewire.errors import InvalidArgumentError

ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_TEXT_PARTS = frozenset(("text", "refusal"))


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the chat template takes them: known roles, text content.

    Raises:
        InvalidArgumentError: naming the message, and the part of it, that can't be served.
    """
    if not messages:
        raise InvalidArgumentError("messages", "at least one message is needed")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(path: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidArgumentError(
            f"{path}.role", f"must be one of {', '.join(sorted(ROLES))}, not {_shown(role)}"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content(f"{path}.content", message)
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(f"{path}.tool_calls", checked["tool_calls"])
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(checked.get(name, ""), str):
            raise InvalidArgumentError(f"{path}.{name}", "must be a string")
    return checked


def _content(path: str, message: dict[str, Any]) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("tool_calls") or message.get("role") == "assistant":
            return ""
        raise InvalidArgumentError(path, "is required")
    if not isinstance(content, list):
        raise InvalidArgumentError(path, "must be a string or a list of parts")
    texts = [_part(f"{path}[{i}]", part) for i, part in enumerate(content)]
    return texts[0]["text"] if len(texts) == 1 else texts


def _part(path: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise InvalidArgumentError(
            f"{path}.type", f"only text parts are supported by this model, not {_shown(kind)}"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{path}.{kind}", "must be a string")
    return {"type": "text", "text": text}


def _tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidArgumentError(path, "must be a list")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgumentError(f"{path}[{index}].function.name", "must be a string")
    return calls


def _shown(value: Any) -> str:
    # A value in a wrong place may be anything, the prompt included: only short words are repeated.
    return repr(value) if isinstance(value, str) and len(value) <= 32 else type(value).__name__
