"""By how much one token may lengthen the shortest way to the end of a JSON text.

That is what it takes to end the most that a token may begin: a member that an object need not have,
one more item of an array, the longest of several alternatives. Nothing is said of schemas with
anything that is not read here, or in which a value must hold another like itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from pagewire_engine.json_schemas.disjoint import ANNOTATIONS, TYPES, Facts, listed, mapping
from pagewire_engine.json_schemas.document import Document, Schema, subschemas
from pagewire_engine.json_schemas.pattern_sizes import pattern_sizes
from pagewire_engine.json_schemas.patterns import has_look_around

_READ = ANNOTATIONS | {
    *("$anchor", "$defs", "$id", "$ref", "additionalProperties", "allOf", "anyOf", "const"),
    *("definitions", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "id", "items"),
    *("maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength"),
    *("minProperties", "minimum", "oneOf", "pattern", "patternProperties", "prefixItems"),
    *("properties", "required", "type", "uniqueItems"),
}
_BRACKETS = 3  # with what comes before or after
_SHORT = 3  # a value without conditions
_NAME = 8  # one that can be chosen
_CHOICES = 4  # tokens that a text takes more where it is chosen part by part
# Characters of the shortest text of a format.
_FORMATS = {
    "date": 10,
    "date-time": 20,
    "duration": 3,
    "email": 8,
    "hostname": 3,
    "ipv4": 7,
    "ipv6": 39,
    "time": 9,
    "uri": 8,
    "uuid": 36,
}
# Characters of which one takes several tokens, in a pattern as they are or escaped: of many bytes,
# or escaped in JSON.
_SPECIAL = re.compile(r"[^ !#-~]|\\[\\ux0fnprtvP]")
_TOKENS_OF_SPECIAL = 6
_MOST_DIGITS = 12
# More is not told: no output has as many, and arrays of arrays soon need more than 64 bits.
_MOST_GROWTH = 1 << 20
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class _UnknownError(Exception):
    """The schema has what is not read here."""


def most_growth(schema: dict[str, Any], num_tokens: Callable[[str], int]) -> int | None:
    """By how many tokens; None where it is not known, or above a million.

    Args:
        schema: as it is compiled.
        num_tokens: tells how many tokens a JSON text has.
    """
    document = Document(json.dumps({k: v for k, v in schema.items() if k != "x-guidance"}))
    if not document.is_one:
        return None
    try:
        growth = max(_Growth(document, num_tokens).all())
    except (_UnknownError, RecursionError):
        return None
    return growth if growth <= _MOST_GROWTH else None


class _Growth:
    """The parts of one document."""

    def __init__(self, document: Document, num_tokens: Callable[[str], int]) -> None:
        self._document = document
        self._num_tokens = num_tokens
        self._known: dict[int, int | None] = {}
        self._facts = Facts(document)
        # What is said of a member by its name, anywhere: an object's parts may say it apart.
        self._members: dict[str, list[Schema]] = {}
        for part in subschemas(document.root):
            for name, schema in mapping(part.get("properties")).items():
                self._members.setdefault(name, []).append(schema)

    def all(self) -> Iterator[int]:
        """What may be begun, all over the document."""
        yield 0
        for part in subschemas(self._document.root):
            if not part.keys() <= _READ:
                raise _UnknownError
            yield self._own(part) if len(_types(part)) != 1 else self._within(part)
            yield self._of_branches(part)
            yield from self._of_objects(part)
            yield from (1 + self._of_value(each) for each in _items(part))

    def _of_objects(self, part: dict[str, Any]) -> Iterator[int]:
        if "object" not in _types(part):
            return
        required = listed(part.get("required"))
        for name, schema in mapping(part.get("properties")).items():
            if name not in required:
                yield self._of_member(name, schema)
        if (others := part.get("additionalProperties", True)) is not False:
            yield _NAME + self._of_value(others)
        for pattern, schema in mapping(part.get("patternProperties")).items():
            yield _NAME + self._of_pattern(pattern) + self._of_value(schema)

    def _of_member(self, name: str, schema: Schema) -> int:
        return (
            1
            + self._num_tokens(json.dumps(name, ensure_ascii=False) + ":")
            + self._of_value(schema)
        )

    def _of_value(self, schema: Schema) -> int:
        """What a value takes at most, where no more is begun than has to be."""
        if isinstance(schema, bool):
            return _SHORT
        if not isinstance(schema, dict):
            raise _UnknownError
        key = id(schema)
        if key not in self._known:
            self._known[key] = None
            total = self._own(schema) + self._of_branches(schema)
            total += sum(self._of_value(each) for each in listed(schema.get("allOf")))
            if isinstance(reference := schema.get("$ref"), str):
                total += self._of_value(self._document.target(reference))
            self._known[key] = total + self._of_items_apart(schema)
        if (known := self._known[key]) is None:
            raise _UnknownError  # it holds itself
        return known

    def _of_branches(self, part: dict[str, Any]) -> int:
        branches = [*listed(part.get("anyOf")), *listed(part.get("oneOf"))]
        return max(map(self._of_value, branches), default=0)

    def _own(self, part: dict[str, Any]) -> int:
        """What the schema's own words ask for, of the types that it allows the longest."""
        if "const" in part or "enum" in part:
            return self._within(part)
        return max(self._of_array(part), self._of_object(part), self._within(part))

    def _within(self, part: dict[str, Any]) -> int:
        """What is left to write of a text, number or constant, wherever one is in it."""
        if "const" in part or "enum" in part:
            return self._longest([part["const"]] if "const" in part else listed(part["enum"]))
        types = _types(part)
        number = self._of_number(part) if types & {"integer", "number"} else _SHORT
        return max(number, self._of_string(part) if "string" in types else _SHORT)

    def _longest(self, values: list[Any]) -> int:
        texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
        longest = 0
        # No text has more tokens than bytes.
        for text in sorted(texts, key=lambda text: -len(text.encode())):
            if len(text.encode()) <= longest:
                break
            longest = max(longest, self._num_tokens(text))
        return longest + _CHOICES

    def _of_number(self, part: dict[str, Any]) -> int:
        bounds = [part[key] for key in _BOUNDS if isinstance(part.get(key), int | float)]
        # In decimal notation: the digits of 1e-20 are twenty.
        digits = max((len(f"{Decimal(str(abs(bound))):f}") for bound in bounds), default=0)
        if digits > _MOST_DIGITS:
            raise _UnknownError
        return _SHORT + 2 * digits

    def _of_string(self, part: dict[str, Any]) -> int:
        least = part.get("minLength", 0)
        if not isinstance(least, int):
            raise _UnknownError
        total = _SHORT + least
        if isinstance(pattern := part.get("pattern"), str):
            total += self._of_pattern(pattern)
        if (name := part.get("format")) is not None:
            total += _FORMATS.get(name, 0)
        return total

    def _of_pattern(self, pattern: str) -> int:
        sizes = None if has_look_around(pattern) else pattern_sizes(pattern)
        if sizes is None:
            raise _UnknownError
        return sizes.rest * (_TOKENS_OF_SPECIAL if _SPECIAL.search(pattern) else 1)

    def _of_array(self, part: dict[str, Any]) -> int:
        least = part.get("minItems", 0)
        if not isinstance(least, int):
            raise _UnknownError
        first = listed(part.get("prefixItems"))
        total = _BRACKETS + sum(1 + self._of_value(each) for each in first[:least])
        if least > len(first):
            total += (least - len(first)) * (1 + self._of_value(part.get("items", True)))
        return total

    def _of_items_apart(self, schema: dict[str, Any]) -> int:
        """What items take of which one part says how many there must be, and another what."""
        parts = self._facts.parts(schema)
        least = max((part.get("minItems", 0) for part in parts), default=0)
        apart = [part for part in parts if part.get("minItems", 0) < least]
        return sum(least * self._of_value(each) for part in apart for each in _own_items(part))

    def _of_object(self, part: dict[str, Any]) -> int:
        members = mapping(part.get("properties"))
        required = listed(part.get("required"))
        others = [
            part.get("additionalProperties", True),
            *mapping(part.get("patternProperties")).values(),
        ]
        total = _BRACKETS
        for name in required:
            own = [members[name]] if name in members else self._members.get(name, others)
            total += max(self._of_member(name, schema) for schema in own)
        least = part.get("minProperties", 0)
        if not isinstance(least, int) or least > len(required):
            raise _UnknownError
        return total


def _types(part: dict[str, Any]) -> frozenset[str]:
    named = part.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    return frozenset(named) if isinstance(named, list) else TYPES


def _items(part: dict[str, Any]) -> Iterator[Schema]:
    if "array" in _types(part):
        yield part.get("items", True)
        yield from listed(part.get("prefixItems"))


def _own_items(part: dict[str, Any]) -> list[Schema]:
    """What the part itself says of items."""
    own = [part["items"]] if "items" in part else []
    return [*own, *listed(part.get("prefixItems"))]
