"""Schemas for what another schema does not allow."""

from __future__ import annotations

from typing import Any

from pagewire_engine.json_schemas.disjoint import (
    FIRST_WITH_CONST,
    TYPES,
    Facts,
    listed,
    mapping,
    type_of,
)
from pagewire_engine.json_schemas.document import Document, Schema
from pagewire_engine.json_schemas.patterns import (
    all_texts_but,
    other_beginnings,
    prefix_of,
    sizes_of,
    texts_of,
)

_MOST_STEPS = 8
_MOST_ALTERNATIVES = 24
# Keyword, the type it speaks of, and the keyword that says the opposite with the number it needs.
_BOUNDS: tuple[tuple[str, str, str, int], ...] = (
    ("minimum", "number", "exclusiveMaximum", 0),
    ("maximum", "number", "exclusiveMinimum", 0),
    ("exclusiveMinimum", "number", "maximum", 0),
    ("exclusiveMaximum", "number", "minimum", 0),
    ("minLength", "string", "maxLength", -1),
    ("maxLength", "string", "minLength", 1),
    ("minItems", "array", "maxItems", -1),
    ("maxItems", "array", "minItems", 1),
)


class Complements:
    """Finds, for schemas of one document, schemas none of whose values they allow. Together those
    need not have all that is left: a keyword that can't be turned round adds none.

    Args:
        document: what the schemas are of.
        facts: about it.
    """

    def __init__(self, document: Document, facts: Facts) -> None:
        self._document = document
        self._facts = facts

    def of(self, schema: Schema, within: Schema = True, steps: int = 0) -> list[Schema]:
        """Alternatives, each without a value of `schema`.

        Args:
            schema: what is not to be met.
            within: what is met besides; alternatives that it rules out are left out. Those that
                lack something, or have another of several values, come alone where there are any:
                to break a rule on a value's form is the last resort.
            steps: how deep this is.
        """
        if not isinstance(schema, dict):
            return [True] if schema is False else []
        if steps > _MOST_STEPS:
            return []
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self._document.target(reference)
            found = [] if target is None else self.of(target, within, steps + 1)
            if self._document.ignores_siblings_of_references or found:
                return found
        plain = self._possible(self._plain(schema, steps), within)
        found = plain or self._possible(self._forced(schema, steps), within)
        return found[:_MOST_ALTERNATIVES]

    def _possible(self, alternatives: list[Schema], within: Schema) -> list[Schema]:
        return [one for one in alternatives if not self._facts.disjoint(one, within)]

    def _plain(self, schema: dict[str, Any], steps: int) -> list[Schema]:
        found: list[Schema] = [
            {"type": "object", "properties": {name: False}}
            for name in listed(schema.get("required"))
            if isinstance(name, str)
        ]
        found += self._other_values(schema)
        found += self._other_types(schema)
        for name, member in mapping(schema.get("properties")).items():
            if self._facts.values(member) is not None:
                found += self._with_member(name, member, steps)
        if "not" in schema:
            found.append(schema["not"])
        found += self._of_branches(schema, steps)
        return found

    def _forced(self, schema: dict[str, Any], steps: int) -> list[Schema]:
        found: list[Schema] = []
        for name, member in mapping(schema.get("properties")).items():
            found += self._with_member(name, member, steps)
        for keyword, type_, opposite, change in _BOUNDS:
            bound = schema.get(keyword)
            if not isinstance(bound, int | float) or isinstance(bound, bool):
                continue
            if type_ == "number" or bound + change >= 0:
                found.append({"type": type_, opposite: bound + change})
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            found += _other_texts(pattern)
        if isinstance(items := schema.get("items"), dict | bool):
            found += [
                {"type": "array", "prefixItems": [one], "minItems": 1}
                for one in self.of(items, steps=steps + 1)
            ]
        return found

    def _with_member(self, name: str, member: Schema, steps: int) -> list[Schema]:
        return [
            {"type": "object", "required": [name], "properties": {name: one}}
            for one in self.of(member, steps=steps + 1)
        ]

    def _of_branches(self, schema: dict[str, Any], steps: int) -> list[Schema]:
        found: list[Schema] = []
        for each in listed(schema.get("allOf")):
            found += self.of(each, steps=steps + 1)
        for keyword in ("anyOf", "oneOf"):
            branches = listed(schema.get(keyword))
            each_of = [self.of(branch, steps=steps + 1) for branch in branches]
            if branches and all(each_of):
                found.append({"allOf": [any_of(some) for some in each_of]})
        return found

    def _other_types(self, schema: dict[str, Any]) -> list[Schema]:
        named = schema.get("type")
        types = (
            {named} if isinstance(named, str) else {t for t in listed(named) if isinstance(t, str)}
        )
        if not types or not types <= TYPES:
            return []
        if types & {"integer", "number"}:
            types |= {"integer", "number"}
        others = sorted(TYPES - types - {"integer"})
        return [{"type": others}] if others else []

    def _other_values(self, schema: dict[str, Any]) -> list[Schema]:
        values = schema.get("enum")
        if self._document.draft >= FIRST_WITH_CONST and "const" in schema:
            values = [schema["const"]]
        if not isinstance(values, list):
            return []
        found: list[Schema] = []
        types = {type_of(value) for value in values}
        texts = [value for value in values if isinstance(value, str)]
        if texts and (pattern := all_texts_but(texts)) is not None:
            found.append({"type": "string", "pattern": pattern})
        if "boolean" in types:
            found.append(
                {"enum": [one for one in (True, False) if all(one is not v for v in values)]}
            )
        if numbers := [v for v in values if type_of(v) in ("integer", "number")]:
            found.append({"type": "number", "exclusiveMinimum": max(numbers)})
            found.append({"type": "number", "exclusiveMaximum": min(numbers)})
            found += [{"type": "integer", "enum": _between(numbers)}]
            types |= {"integer", "number"}
        if "array" in types:
            longest = max(len(value) for value in values if isinstance(value, list))
            found.append({"type": "array", "minItems": longest + 1})
        if others := sorted(TYPES - types - {"integer"}):
            found.append({"type": others})
        return [one for one in found if one.get("enum") != []]


def any_of(alternatives: list[Schema]) -> Schema:
    """One schema for several alternatives."""
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _between(numbers: list[Any]) -> list[int]:
    low, high = int(min(numbers)), int(max(numbers))
    if high - low > _MOST_ALTERNATIVES:
        return []
    return [number for number in range(low + 1, high) if number not in numbers]


def _other_texts(pattern: str) -> list[Schema]:
    found = _of_other_sizes(pattern)
    if (beginning := other_beginnings(pattern)) is not None:
        found.append({"type": "string", "pattern": beginning})
    texts, prefix = texts_of(pattern), prefix_of(pattern)
    other: str | None = None
    if texts is not None:
        # Python's `$` is found before a last line break too.
        other = all_texts_but([*texts, *(f"{text}\n" for text in texts)])
    elif prefix is not None:
        other = all_texts_but((), [prefix])
    return found if other is None else [{"type": "string", "pattern": other}]


def _of_other_sizes(pattern: str) -> list[Schema]:
    sizes = sizes_of(pattern)
    if sizes is None:
        return []
    # One more, as Python's `$` is found before a last line break too.
    found: list[Schema] = []
    if sizes[1] is not None:
        found.append({"type": "string", "minLength": sizes[1] + 2})
    if sizes[0] > 0:
        found.append({"type": "string", "maxLength": sizes[0] - 1})
    return found
