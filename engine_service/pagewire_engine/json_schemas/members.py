"""What is said of an object's members, or of an array's items, as a whole."""

from __future__ import annotations

import itertools
import re
from typing import Any

from pagewire_engine.json_schemas.disjoint import Facts, listed, mapping
from pagewire_engine.json_schemas.document import Schema
from pagewire_engine.json_schemas.patterns import found_everywhere, matches

_MOST_ALTERNATIVES = 16
_MOST_CONTAINED = 32


def containing(schema: dict[str, Any]) -> list[Schema] | None:
    """`contains`: the first items are those that are asked for. None for a `maxContains`."""
    if "contains" not in schema:
        return []
    if "maxContains" in schema or not isinstance(least := schema.get("minContains", 1), int):
        return None
    if least > _MOST_CONTAINED:
        return None
    return [{"prefixItems": [schema["contains"]] * least, "minItems": least}] if least else []


def with_names(schema: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Without `propertyNames`, where that can be said by a pattern."""
    if "propertyNames" not in schema:
        return schema
    names = schema["propertyNames"]
    parts = facts.parts(names)
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if "string" not in facts.types(names):
        return rest | {"maxProperties": 0}
    if names is True or all(not set(part) - _OF_ANY_NAME for part in parts):
        return rest
    if (pattern := _pattern_of(names, facts)) is None:
        return schema
    properties = dict(mapping(schema.get("properties")))
    patterns = mapping(schema.get("patternProperties"))
    for name in properties:
        if not matches(pattern, name):
            properties[name] = False
        elif ruling := [each for key, each in patterns.items() if matches(key, name) is not False]:
            properties[name] = {"allOf": [properties[name], *ruling]}
    allowed = facts.values(names)
    others = rest.pop("additionalProperties", True)
    rest["additionalProperties"] = False
    if allowed is not None:
        for name in allowed:
            if isinstance(name, str) and name not in properties:
                ruling = [each for key, each in patterns.items() if matches(key, name) is not False]
                properties[name] = {"allOf": ruling} if ruling else others
        rest.pop("patternProperties", None)
    elif patterns:
        rest["patternProperties"] = {k: v for k, v in patterns.items() if k == pattern}
    elif others is not False:
        rest["patternProperties"] = {pattern: others}
    return rest | ({"properties": properties} if properties else {})


def with_any_name(schema: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Without a `patternProperties` whose one pattern is found in every name: it says the same as
    `additionalProperties`, with which references may lead back to where they stand."""
    patterns = mapping(schema.get("patternProperties"))
    if len(patterns) != 1 or not found_everywhere(next(iter(patterns))):
        return schema
    (ruling,) = patterns.values()
    rest = {key: value for key, value in schema.items() if key != "patternProperties"}
    rest["additionalProperties"] = ruling
    properties = mapping(schema.get("properties"))
    if properties:
        rest["properties"] = {
            name: each if each == ruling else {"allOf": [each, ruling]}
            for name, each in properties.items()
        }
    return rest


def with_least(schema: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Without a `minProperties` that needs some of the members that may be left out."""
    least = schema.get("minProperties")
    if not isinstance(least, int):
        return schema
    required = facts.required(schema)
    rest = {key: value for key, value in schema.items() if key != "minProperties"}
    if least <= len(required):
        return rest
    optional = _optional(schema, required)
    if not optional:
        return schema
    missing = least - len(required)
    ways = [{"required": list(some)} for some in _choices(optional, missing)]
    if not ways:
        return schema
    rest["allOf"] = [*listed(rest.get("allOf")), {"type": "object", "anyOf": ways}]
    types = facts.types(schema)
    if types != {"object"}:
        others: Schema = {"type": sorted(types - {"object"})}
        rest["allOf"][-1] = {"anyOf": [rest["allOf"][-1], others]}
    return rest


def with_most(schema: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Without a `maxProperties` where members may be left out."""
    most = schema.get("maxProperties")
    if not isinstance(most, int) or mapping(schema.get("patternProperties")):
        return schema
    properties = mapping(schema.get("properties"))
    required = facts.required(schema)
    optional = _optional(schema, required)
    if not optional:
        return schema
    rest = {key: value for key, value in schema.items() if key != "maxProperties"}
    rest["additionalProperties"] = False
    room = most - len(required)
    if len(required) + len(optional) <= most and len(required.keys() - properties) == 0:
        return rest
    if room < 0 or required.keys() - properties:
        return schema
    ways: list[Schema] = [
        {"properties": {name: False for name in optional if name not in some}}
        for some in _choices(optional, min(room, len(optional)))
    ]
    rest["allOf"] = [*listed(rest.get("allOf")), {"anyOf": ways}]
    return rest


def all_evaluated(schema: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """`unevaluatedProperties: false` as `additionalProperties`: names are those that the schema and
    what always holds beside it have."""
    if schema.get("unevaluatedProperties") is not False:
        return schema
    rest = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
    names: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    for part in facts.parts(schema):
        names |= dict.fromkeys(mapping(part.get("properties")), True)
        patterns |= dict.fromkeys(mapping(part.get("patternProperties")), True)
    closed = {"properties": names, "patternProperties": patterns, "additionalProperties": False}
    rest["allOf"] = [*listed(rest.get("allOf")), {k: v for k, v in closed.items() if v != {}}]
    return rest


_OF_ANY_NAME = frozenset(("$comment", "$ref", "description", "format", "title", "type"))
_OF_A_PATTERN = _OF_ANY_NAME | {"const", "enum", "maxLength", "minLength", "pattern"}


def _pattern_of(names: Schema, facts: Facts) -> str | None:
    """One pattern for the texts that a schema of names allows; None where it takes more."""
    values = facts.values(names)
    if values is not None:
        texts = [re.escape(value) for value in values if isinstance(value, str)]
        return f"^(?:{'|'.join(texts)})$" if texts else None
    parts = [part for part in facts.parts(names) if set(part) - _OF_ANY_NAME]
    if len(parts) != 1 or set(parts[0]) - _OF_A_PATTERN:
        return None
    part = parts[0]
    sized = "minLength" in part or "maxLength" in part
    if "pattern" in part:
        return None if sized else str(part["pattern"])
    return rf"^[\s\S]{{{part.get('minLength', 0)},{part.get('maxLength', '')}}}$"


def _optional(schema: dict[str, Any], required: dict[str, None]) -> list[str]:
    properties = mapping(schema.get("properties"))
    return [name for name, each in properties.items() if each is not False and name not in required]


def _choices(names: list[str], count: int) -> list[tuple[str, ...]]:
    """Each way to choose so many of the names, or, where those are too many, neighbours."""
    ways = list(itertools.islice(itertools.combinations(names, count), _MOST_ALTERNATIVES + 1))
    if len(ways) <= _MOST_ALTERNATIVES:
        return ways
    last = min(len(names) - count + 1, _MOST_ALTERNATIVES)
    return [tuple(names[start : start + count]) for start in range(last)]
