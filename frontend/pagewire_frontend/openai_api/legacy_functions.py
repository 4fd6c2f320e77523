"""`functions` and `function_call`, by which OpenAI's first clients ask for calls: as tools, and
their answers as those clients read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.outputs import FinishReason
from pagewire_frontend.answers import ToolCall, ToolCallDelta
from pagewire_frontend.openai_api.chunks import FINISH_NAMES, CallShape
from pagewire_frontend.tool_choice import ToolUse, tool_use

LEGACY_NAMES = {"tools": "functions", "tool_choice": "function_call"}
"""What errors about the tools are about."""


def legacy_tool_use(
    functions: Sequence[Mapping[str, Any]] | None,
    function_call: Any,
    tools: Sequence[Any] | None,
    tool_choice: Any,
) -> ToolUse | None:
    """The tools that `functions` are, at most one of which is called; None where there are none.

    Raises:
        InvalidArgumentError: one of them or the choice is wrong, or the newer fields are there too.
    """
    if not functions:
        # Without any function there is nothing that these could change.
        if function_call in (None, "auto") or (function_call == "none" and not tools):
            return None
        raise InvalidArgumentError(
            "function_call", "needs functions; of tools tell it by tool_choice, its newer name"
        )
    if tools or tool_choice is not None:
        raise InvalidArgumentError(
            "functions", "can't be sent together with tools and tool_choice, their newer names"
        )
    as_tools = [{"type": "function", "function": function} for function in functions]
    with _in_legacy_words():
        return tool_use(as_tools, _choice(function_call), parallel_tool_calls=False)


def _choice(function_call: Any) -> Any:
    if function_call in (None, "none", "auto"):
        return function_call
    name = function_call.get("name") if isinstance(function_call, Mapping) else None
    if not isinstance(name, str):
        raise InvalidArgumentError("tool_choice", "must be 'none', 'auto' or {'name': ...}")
    return {"type": "function", "function": {"name": name}}


@contextmanager
def _in_legacy_words() -> Iterator[None]:
    try:
        yield
    except PagewireError as error:
        field, bracket, rest = error.field.partition("[")
        # Of `tools[0].function.name` the function itself is listed here.
        rest = rest.replace("].function", "]", 1)
        error.field = LEGACY_NAMES.get(field, field) + bracket + rest
        raise


def _delta(calls: Sequence[ToolCallDelta]) -> dict[str, Any]:
    (call,) = calls
    named = {"name": call.name} if call.name else {}
    return {"function_call": named | {"arguments": call.arguments}}


def _whole(calls: Sequence[ToolCall]) -> dict[str, Any]:
    (call,) = calls
    return {"function_call": {"name": call.name, "arguments": call.arguments}}


FUNCTION_CALL = CallShape(
    FINISH_NAMES | {FinishReason.TOOL_CALLS: "function_call"}, delta=_delta, whole=_whole
)
