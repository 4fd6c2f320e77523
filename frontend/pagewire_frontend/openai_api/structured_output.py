"""Constraints on the output, as OpenAI's clients (`response_format`) and vLLM's
(`structured_outputs`, and `guided_*` of its older versions) ask for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import FIELD, StructuredOutput

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# vLLM's names, and ours.
_KINDS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
GUIDED = tuple(f"guided_{name}" for name in _KINDS if name != "json_object")
# What vLLM knows besides, by the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request asks for.

    Attributes:
        value: None where nothing is asked for.
        field_names: what the client called the fields that errors name.
    """

    value: StructuredOutput | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)


def requested_constraint(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
) -> Constraint:
    """The one constraint that a body has in any of its places.

    Args:
        response_format: OpenAI's field.
        structured_outputs: vLLM's.
        guided: vLLM's older `guided_*` fields by name; None where unset.

    Raises:
        InvalidArgumentError: there are several, or one that can't be served; it is named as the
            client knows it.
    """
    asked: list[tuple[str, Constraint]] = []
    if response_format is not None:
        asked.append(("response_format", _from_response_format(response_format)))
    if structured_outputs is not None:
        asked.append(("structured_outputs", _from_structured_outputs(structured_outputs)))
    for name, value in guided.items():
        if value is not None:
            kind = _KINDS[name.removeprefix("guided_")]
            asked.append((name, _named({FIELD: name, f"{FIELD}.{kind}": name}, {kind: value})))
    given = [each for each in asked if each[1].value is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidArgumentError(given[1][0], f"{names} exclude one another: set one of them")
    return given[0][1] if given else Constraint()


def _from_response_format(asked: Mapping[str, Any]) -> Constraint:
    where = "response_format"
    kind = asked.get("type")
    if kind == "text":
        return Constraint()
    if kind == "json_object":
        return _from_json_object(asked.get("schema"), where)
    if kind != "json_schema":
        raise InvalidArgumentError(
            f"{where}.type", f"must be text, json_object or json_schema, not {kind!r:.80}"
        )
    path = f"{where}.json_schema"
    described = asked.get("json_schema")
    if not isinstance(described, Mapping):
        raise InvalidArgumentError(path, "is required, and must be an object")
    name, strict = described.get("name"), described.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        must = "is required:" if name is None else "must be"
        raise InvalidArgumentError(
            f"{path}.name", f"{must} 1 to 64 letters, digits, underscores or dashes"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidArgumentError(f"{path}.strict", "must be true or false")
    schema = described.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidArgumentError(f"{path}.schema", "is required, and must be an object")
    names = {FIELD: where, f"{FIELD}.json_schema": f"{path}.schema"}
    # Only who says so can do with a schema that is not kept in full.
    return _named(names, {"json_schema": schema, "lenient": strict is False})


def _from_json_object(schema: Any, where: str) -> Constraint:
    """JSON of any kind, or of a schema beside the type, as llama.cpp, Together and Fireworks have
    it. An empty one says no more than the type does."""
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidArgumentError(f"{where}.schema", "must be an object")
    if schema:
        names = {FIELD: where, f"{FIELD}.json_schema": f"{where}.schema"}
        return _named(names, {"json_schema": schema})
    return _named({FIELD: where, f"{FIELD}.json_object": where}, {"json_object": True})


def _from_structured_outputs(asked: Mapping[str, Any]) -> Constraint:
    where = "structured_outputs"
    for name, neutral in _NOT_SERVED.items():
        if asked.get(name) not in neutral:
            raise InvalidArgumentError(
                f"{where}.{name}", "is not supported by this server: leave it out"
            )
    values = {ours: asked.get(name) for name, ours in _KINDS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        raise InvalidArgumentError(where, f"must have one of {', '.join(_KINDS)}")
    names = {f"{FIELD}.{ours}": f"{where}.{name}" for name, ours in _KINDS.items()}
    return _named({FIELD: where} | names, given)


def _named(names: Mapping[str, str], values: dict[str, Any]) -> Constraint:
    if values.get("choice") == []:  # which Python's default stands for: not given
        raise InvalidArgumentError(names[f"{FIELD}.choice"], "has no texts")
    try:
        return Constraint(StructuredOutput(**values), names)
    except InvalidArgumentError as error:
        error.field = names.get(error.field, error.field)
        raise
