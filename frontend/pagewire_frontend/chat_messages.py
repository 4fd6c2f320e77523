"""OpenAI-shaped messages in the shape that a given chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import check_count
from pagewire_frontend.compiled_template import CompiledTemplate
from pagewire_frontend.faults import renaming
from pagewire_frontend.legacy_messages import with_tool_calls

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
# A role may end up between the template's own characters, as in `<|role|>`: none but these.
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
# In the order of transformers.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def prepare_messages(
    messages: list[dict[str, Any]], template: CompiledTemplate
) -> list[dict[str, Any]]:
    """Copies of the messages as the template wants them.

    Content becomes a string or a list of parts, tool calls' arguments an object or JSON text,
    function calls of old become tool calls, and `developer` becomes `system` where the template
    does not know it. Null fields are left out: many templates print or trip over them. But content
    that is null or missing becomes None for the templates that take it, and "" for the others.

    Raises:
        InvalidArgumentError: a message is not one, or has parts that are not text.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidArgumentError("messages", "must be a list of at least one message")
    check_count("messages", messages, MAX_MESSAGES)
    messages, names = with_tool_calls(messages)
    with renaming(names):
        return [_prepare(message, index, template) for index, message in enumerate(messages)]


def _prepare(message: dict[str, Any], index: int, template: CompiledTemplate) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidArgumentError(where, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidArgumentError(
            f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}, not {role!r}"
        )
    prepared = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and not template.knows_developer:
        prepared["role"] = "system"
    if "content" not in prepared and isinstance(prepared.get("refusal"), str):
        prepared["content"] = prepared["refusal"]  # no template knows the other name
    if "content" in prepared:
        prepared["content"] = _content(prepared["content"], f"{where}.content", template)
    elif _takes_null(prepared, template):
        prepared["content"] = None
    else:
        prepared["content"] = _content("", f"{where}.content", template)
    for name in _REASONING_NAMES:
        if name in prepared:
            # gpt-oss's template reads `thinking`.
            prepared = {"thinking": prepared[name], **prepared}
            prepared["reasoning_content"] = prepared[name]
            break
    if prepared.get("tool_calls") == []:
        del prepared["tool_calls"]  # as if it were null
    if "tool_calls" in prepared:
        if not isinstance(prepared["tool_calls"], list):
            raise InvalidArgumentError(f"{where}.tool_calls", "must be a list")
        prepared["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{n}]", template)
            for n, call in enumerate(prepared["tool_calls"])
        ]
    return prepared


def prepare_tools(
    tools: Sequence[Mapping[str, Any]] | None, template: CompiledTemplate
) -> list[Mapping[str, Any]] | None:
    """The tools as the template wants them, None for none: whole, where it trips over what a client
    left out."""
    if not tools:
        return None
    if template.takes_bare_tools:
        return list(tools)
    return [_whole_tool(tool) for tool in tools]


def _whole_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool  # offline, templates may be given what they like
    given = function.get("parameters") or {}
    if isinstance(given, Mapping):
        given = {"type": "object", "properties": {}} | {
            name: value for name, value in given.items() if value is not None
        }
    described = {"description": function.get("description") or "", "parameters": given}
    return {**tool, "function": {**function, **described}}


def _takes_null(message: dict[str, Any], template: CompiledTemplate) -> bool:
    if message["role"] != "assistant":
        return False
    if message.get("tool_calls"):
        return template.takes_null_beside_tool_calls
    return template.takes_null_alone


def _content(content: Any, where: str, template: CompiledTemplate) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        if template.takes_strings:
            return content
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidArgumentError(where, "must be a string or a list of parts")
    parts = [_text_part(part, f"{where}[{n}]") for n, part in enumerate(content)]
    if template.takes_parts:
        return parts
    return "\n".join(part["text"] for part in parts)


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or part.get("type") is None:
        raise InvalidArgumentError(where, 'must be a part: {"type": "text", "text": "..."}')
    if part["type"] not in ("text", "refusal"):
        raise InvalidArgumentError(
            f"{where}.type", f"this model takes parts of type 'text' only, not {part['type']!r:.60}"
        )
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{where}.text", "must be a string")
    return {"type": "text", "text": text}


def _tool_call(call: Any, where: str, template: CompiledTemplate) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"{where}.function", "must be an object with a name")
    arguments = function.get("arguments")
    if template.takes_argument_strings_only:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        arguments = arguments if arguments.strip() else "{}"
    elif isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _parsed(arguments: str, where: str) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(where, f"must be JSON ({error})") from None
