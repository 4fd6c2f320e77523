"""Values that models write in other ways than as JSON, made JSON."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

from pagewire_frontend.answers import to_json
from pagewire_frontend.tool_parsers.json_text import MalformedError

# JSON's words, which models write into Python too.
_WORDS = {"true": True, "false": False, "null": None}
_TYPE_NAMES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def types_of(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]] | None = None
) -> frozenset[str]:
    """JSON's names of the types that a schema allows; empty where it does not tell.

    Args:
        schema: of one argument.
        root: the schema that it is part of, for its references.
        known: what references stand for. Each is looked up once, for a client may have made them
            refer to one another without end.
    """
    known = {} if known is None else known
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = frozenset()
            known[reference] = types_of(_referred(reference, root), root, known)
        return known[reference]
    if isinstance(named := schema.get("type"), str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(key), list):
            each = [types_of(one, root, known) for one in alternatives]
            return frozenset().union(*each) if all(each) else frozenset()
    if isinstance(values := schema.get("enum"), list):
        return frozenset(name for value in values for name in _TYPE_NAMES.get(type(value), ()))
    return frozenset()


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def argument_json(text: str, types: frozenset[str]) -> str:
    """JSON text of an argument that stands in the answer without quotes.

    Args:
        text: as it stands there.
        types: that its schema allows; none: any.
    """
    for read in (json.loads, python_value):
        try:
            value = read(text.strip())
            if "integer" in types and isinstance(value, float) and value.is_integer():
                value = int(value)
            if not types or types.intersection(_TYPE_NAMES[type(value)]):
                return to_json(value)
        except (MalformedError, ValueError, RecursionError):
            pass
    return to_json(text.removeprefix("\n").removesuffix("\n"))


def python_value(text: str) -> Any:
    """What a Python literal stands for, as JSON has it.

    Raises:
        MalformedError: it is none, or stands for what JSON has not.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python would rather not see
            return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise MalformedError from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise MalformedError
