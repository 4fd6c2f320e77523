"""Which tools an answer may, must or must not call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import check_count
from pagewire.structured_output import DATA_KEYWORDS, MAPS_OF_SCHEMAS, StructuredOutput
from pagewire_frontend.answers import TOOL_NAME
from pagewire_frontend.chat_messages import MAX_TOOLS

ToolDefinition = Mapping[str, Any]


class ToolChoice(Enum):
    """What the client leaves to the model."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one chat.

    Attributes:
        tools: OpenAI-shaped definitions, as the client sent them.
        choice: whether they are called.
        name: of the tool to call, with ToolChoice.NAMED.
        allowed: names of those that may be called, with AUTO and REQUIRED; none: all may.
        parallel: an answer may have several calls.
        fit_max_tokens: a call that is demanded is brought to its end before `max_tokens` cuts it.
    """

    tools: tuple[ToolDefinition, ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    name: str = ""
    allowed: frozenset[str] = frozenset()
    parallel: bool = True
    fit_max_tokens: bool = True

    @property
    def demands_calls(self) -> bool:
        """The answer is nothing but calls, and held to that."""
        return self.choice in (ToolChoice.NAMED, ToolChoice.REQUIRED)

    @property
    def callable_tools(self) -> tuple[ToolDefinition, ...]:
        """Those that the answer may call."""
        if self.choice is ToolChoice.NONE:
            return ()
        if self.choice is ToolChoice.NAMED:
            return tuple(tool for tool in self.tools if tool["function"]["name"] == self.name)
        if self.allowed:
            return tuple(tool for tool in self.tools if tool["function"]["name"] in self.allowed)
        return self.tools

    @property
    def shown_tools(self) -> tuple[ToolDefinition, ...]:
        """Those that the template is given. All, where the answer is held to the choice: prompts
        that differ in it alone then begin alike, and are found in the prefix cache. But a model
        that is free calls what it sees, so it sees what it may call."""
        return self.callable_tools if self.choice is ToolChoice.AUTO else self.tools


def tool_use(
    tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None
) -> ToolUse:
    """The tools of a request in OpenAI's words.

    Args:
        tools: definitions.
        tool_choice: "none", "auto", "required", `{"type": "function", "function": {"name": N}}` or
            `{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools":
            [{"type": "function", "function": {"name": N}}]}}`. None: auto where there are tools.
        parallel_tool_calls: None: true.

    Raises:
        InvalidArgumentError: a definition or the choice is wrong.
    """
    checked = _checked_tools(tools or ())
    use = ToolUse(checked, parallel=parallel_tool_calls is not False)
    if tool_choice is None:
        return replace(use, choice=ToolChoice.AUTO if checked else ToolChoice.NONE)
    if isinstance(tool_choice, str):
        return _by_word(use, tool_choice)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        return _by_list(use, tool_choice.get("allowed_tools"))
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or tool_choice.get("type") != "function":
        raise InvalidArgumentError(
            "tool_choice",
            "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} "
            "or {'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}",
        )
    return named_tool(use, name)


def named_tool(use: ToolUse, name: str) -> ToolUse:
    """The same, with a call of the tool demanded. Raises InvalidArgumentError where it is none."""
    if all(tool["function"]["name"] != name for tool in use.tools):
        raise InvalidArgumentError("tool_choice", f"{name!r} is none of the tools")
    return replace(use, choice=ToolChoice.NAMED, name=name)


def among(use: ToolUse, allowed: Mapping[str, str]) -> ToolUse:
    """The same, with calls of some of the tools alone.

    Args:
        use: of a choice that may call.
        allowed: the names of those, and what the client calls the place of each.

    Raises:
        InvalidArgumentError: one is none of the tools.
    """
    names = {tool["function"]["name"] for tool in use.tools}
    for name, where in allowed.items():
        if name not in names:
            raise InvalidArgumentError(where, f"{name!r:.140} is none of the tools")
    return replace(use, allowed=frozenset(allowed))


def fitting(use: ToolUse, fit_max_tokens: bool | None) -> ToolUse:
    """The same, with the client's word on whether demanded calls are brought to their end.

    Raises:
        InvalidArgumentError: it is said of calls that are not demanded.
    """
    if fit_max_tokens is None:
        return use
    if not use.demands_calls:
        raise InvalidArgumentError(
            "fit_max_tokens",
            "needs a constraint, such as response_format, or a tool_choice that demands a call",
        )
    return replace(use, fit_max_tokens=fit_max_tokens)


def constraint_for(use: ToolUse) -> StructuredOutput | None:
    """What the answer must look like for the choice to be kept; None where the model is free.

    It is JSON, whatever the model's own format: `tool_parsers.forced` reads it. What of a schema
    can't be enforced is left out, unless its tool is `strict`.

    Raises:
        InvalidArgumentError: the schemas are too long.
    """
    if not use.demands_calls:
        return None
    strict = any(tool["function"].get("strict") for tool in use.callable_tools)
    try:
        if use.choice is ToolChoice.NAMED:
            schema = dict(_parameters(use.callable_tools[0]["function"]))
        else:
            schema = _schema_of_calls(use)
        return StructuredOutput(
            json_schema=json.dumps(schema), lenient=not strict, fit_max_tokens=use.fit_max_tokens
        )
    except (InvalidArgumentError, ValueError, RecursionError) as error:
        raise InvalidArgumentError("tools", f"their schemas can't be enforced: {error}") from None


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    # OpenAI's word for a function without any is that it takes none.
    return function.get("parameters") or {"type": "object", "additionalProperties": False}


def _schema_of_calls(use: ToolUse) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(use.callable_tools):
        function = tool["function"]
        place = f"tool{number}"
        # Whole, as references count from the root: what they name may be anywhere in it.
        definitions[place] = _moved(_parameters(function), f"#/$defs/{place}")
        properties = {
            "name": {"const": function["name"]},
            "parameters": {"$ref": f"#/$defs/{place}"},
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not use.parallel:
        schema["maxItems"] = 1
    schema["$defs"] = definitions
    return schema


def _by_word(use: ToolUse, word: str) -> ToolUse:
    if word not in ("none", "auto", "required"):
        raise InvalidArgumentError(
            "tool_choice", f"must be 'none', 'auto', 'required' or a function, not {word!r:.40}"
        )
    choice = ToolChoice(word)
    if use.tools:
        return replace(use, choice=choice)
    if choice is ToolChoice.REQUIRED:
        raise InvalidArgumentError("tool_choice", "'required' needs tools")
    return use


def _by_list(use: ToolUse, choice: Any) -> ToolUse:
    where = "tool_choice.allowed_tools"
    if not isinstance(choice, Mapping):
        raise InvalidArgumentError(where, "must be an object with mode and tools")
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidArgumentError(
            f"{where}.mode", f"must be 'auto' or 'required', not {mode!r:.40}"
        )
    if not isinstance(listed, list) or not listed:
        raise InvalidArgumentError(f"{where}.tools", "must be a list of at least one tool")
    check_count(f"{where}.tools", listed, MAX_TOOLS)
    allowed: dict[str, str] = {}
    for index, tool in enumerate(listed):
        place = f"{where}.tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidArgumentError(f"{place}.type", "must be 'function'")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise InvalidArgumentError(f"{place}.function.name", "must name one of the tools")
        allowed.setdefault(name, f"{place}.function.name")
    return among(replace(use, choice=ToolChoice(mode)), allowed)


def _checked_tools(tools: Sequence[Any]) -> tuple[ToolDefinition, ...]:
    check_count("tools", tools, MAX_TOOLS)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidArgumentError(f"{where}.type", "must be 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise InvalidArgumentError(f"{where}.function", "must be an object with a name")
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"{where}.function.name",
                "must be 1 to 128 letters, digits or any of _ - . : /",
            )
        if name in names:
            raise InvalidArgumentError(f"{where}.function.name", f"{name!r} names two tools")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise InvalidArgumentError(f"{where}.function.description", "must be a string")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise InvalidArgumentError(f"{where}.function.parameters", "must be a JSON schema")
        if not isinstance(function.get("strict"), bool | None):
            raise InvalidArgumentError(f"{where}.function.strict", "must be true or false")
    return tuple(tools)


def _moved(value: Any, place: str) -> Any:
    """A schema, or what stands in one, with references such as it has to have at `place`."""
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(own_root := value.get("$id"), str) and not own_root.startswith("#"):
        return value  # references in it count from here
    moved: dict[str, Any] = {}
    for key, item in value.items():
        if key in DATA_KEYWORDS:
            moved[key] = item
        elif key in MAPS_OF_SCHEMAS and isinstance(item, Mapping):
            # By names: one may be `$ref`, or `const`.
            moved[key] = {name: _moved(each, place) for name, each in item.items()}
        elif key == "$ref" and isinstance(item, str) and (item == "#" or item.startswith("#/")):
            moved[key] = place + item[1:]
        else:
            moved[key] = _moved(item, place)
    return moved
