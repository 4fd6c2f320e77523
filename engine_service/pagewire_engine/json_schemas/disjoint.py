"""What can be told of a schema without a value: its types, its values, what it requires; and
whether two schemas have no value in common."""

from __future__ import annotations

import itertools
import json
from typing import Any

from pagewire_engine.json_schemas.document import Document, Schema
from pagewire_engine.json_schemas.patterns import matches

TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
ANNOTATIONS = frozenset(
    ("$comment", "$schema", "default", "deprecated", "description", "example", "examples", "title")
)
FIRST_WITH_CONST = 6
_MOST_STEPS = 12
_MOST_COMPARED = 256
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def value_key(value: Any) -> str:
    """The same text for values that JSON schema takes for the same."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(value_key(item) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}:{value_key(value[key])}" for key in sorted(value))
        return f"{{{','.join(items)}}}"
    return json.dumps(value)


def type_of(value: Any) -> str:
    """JSON schema's narrowest name for the type of a JSON value."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
    return "object"


class Facts:
    """Answers about the schemas of one document. What it does not know, it takes for possible."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def parts(self, schema: Schema, steps: int = 0) -> list[dict[str, Any]]:
        """The mappings that all hold where the schema does: itself, what it refers to, and its
        `allOf`. A schema that nothing meets is `{"type": []}`."""
        if schema is False:
            return [{"type": []}]
        if not isinstance(schema, dict) or steps > _MOST_STEPS:
            return []
        reference = schema.get("$ref")
        found: list[dict[str, Any]] = []
        if isinstance(reference, str):
            found = self.parts(self._document.target(reference), steps + 1)
            if self._document.ignores_siblings_of_references:
                return found
        found = [schema, *found]
        for each in listed(schema.get("allOf")):
            found += self.parts(each, steps + 1)
        return found

    def types(self, schema: Schema, steps: int = 0) -> frozenset[str]:
        """The types that its values may have; "number" comes with "integer"."""
        possible = TYPES
        for part in self.parts(schema, steps):
            named = part.get("type")
            if isinstance(named, str):
                named = [named]
            if isinstance(named, list) and all(isinstance(name, str) for name in named):
                possible &= frozenset(named) | ({"integer"} if "number" in named else set())
            if (values := self._own_values(part)) is not None:
                possible &= {type_of(value) for value in values}
            for keyword in ("anyOf", "oneOf"):
                if (branches := listed(part.get(keyword))) and steps < _MOST_STEPS:
                    each = (self.types(branch, steps + 2) for branch in branches)
                    possible &= frozenset(itertools.chain.from_iterable(each))
        return possible

    def values(self, schema: Schema, steps: int = 0) -> list[Any] | None:
        """Values among which all of its own are; None where they can't be listed."""
        if steps > _MOST_STEPS:
            return None
        for part in self.parts(schema, steps):
            if (values := self._own_values(part)) is not None:
                return values
            for keyword in ("anyOf", "oneOf"):
                if branches := listed(part.get(keyword)):
                    each = [self.values(branch, steps + 2) for branch in branches]
                    if None not in each:
                        return [value for some in each for value in some or ()]
        types = self.types(schema)
        if types <= {"boolean", "null"}:
            return [
                v for v, t in ((True, "boolean"), (False, "boolean"), (None, "null")) if t in types
            ]
        return None

    def allows_all(self, schema: Schema) -> bool:
        """Whether it is sure that every value meets it."""
        return schema is True or (isinstance(schema, dict) and set(schema) <= ANNOTATIONS)

    def required(self, schema: Schema) -> dict[str, None]:
        """Names that its objects have, as an ordered set."""
        names = (listed(part.get("required")) for part in self.parts(schema))
        return {name: None for some in names for name in some if isinstance(name, str)}

    def member(self, schema: Schema, name: str) -> list[Schema]:
        """Schemas that the member of this name meets, where there is one."""
        found: list[Schema] = []
        for part in self.parts(schema):
            properties = mapping(part.get("properties"))
            patterns = mapping(part.get("patternProperties"))
            matched = {pattern: matches(pattern, name) for pattern in patterns}
            if name in properties:
                found.append(properties[name])
            found += [patterns[pattern] for pattern, does in matched.items() if does]
            if name not in properties and not any(does is not False for does in matched.values()):
                found.append(part.get("additionalProperties", True))
        return found

    def disjoint(self, one: Schema, other: Schema, steps: int = 0) -> bool:
        """Whether it is sure that no value meets both."""
        if steps > _MOST_STEPS:
            return False
        types = self.types(one) & self.types(other)
        if not types:
            return True
        first, second = self.values(one), self.values(other)
        if first is not None and second is not None:
            return not {value_key(v) for v in first} & {value_key(v) for v in second}
        for some, more in ((one, other), (other, one)):
            for part in self.parts(some):
                for keyword in ("anyOf", "oneOf"):
                    branches = listed(part.get(keyword))
                    if branches and all(self.disjoint(b, more, steps + 3) for b in branches):
                        return True
        if types <= {"integer", "number"}:
            return self._ranges_disjoint(one, other)
        if types == {"object"}:
            return self._objects_disjoint(one, other, steps)
        if types == {"array"}:
            return self._sizes_disjoint(one, other, "minItems", "maxItems")
        if types == {"string"}:
            return self._sizes_disjoint(one, other, "minLength", "maxLength")
        return False

    def _own_values(self, part: dict[str, Any]) -> list[Any] | None:
        if "const" in part and self._document.draft >= FIRST_WITH_CONST:
            return [part["const"]]
        values = part.get("enum")
        return values if isinstance(values, list) else None

    def _objects_disjoint(self, one: Schema, other: Schema, steps: int) -> bool:
        for some, more in ((one, other), (other, one)):
            for name in itertools.islice(self.required(some), _MOST_COMPARED):
                for mine in self.member(some, name) or [True]:
                    if any(
                        self.disjoint(mine, theirs, steps + 3) for theirs in self.member(more, name)
                    ):
                        return True
        return False

    def _sizes_disjoint(self, one: Schema, other: Schema, least: str, most: str) -> bool:
        return any(
            low > high
            for some, more in ((one, other), (other, one))
            for low in self._numbers(some, (least,))
            for high in self._numbers(more, (most,))
        )

    def _ranges_disjoint(self, one: Schema, other: Schema) -> bool:
        for some, more in ((one, other), (other, one)):
            for low in self._numbers(some, _LOWER):
                if any(low > high for high in self._numbers(more, _UPPER)):
                    return True
            if set(self._numbers(some, _LOWER[:1])) & set(self._numbers(more, _UPPER[1:])):
                return True
            if set(self._numbers(some, _LOWER[1:])) & set(self._numbers(more, _UPPER)):
                return True
        return False

    def lower_bounds(self, schema: Schema) -> list[float]:
        """Numbers below which none of its integers is."""
        return [
            *self._numbers(schema, _LOWER[:1]),
            *(n + 1 for n in self._numbers(schema, _LOWER[1:])),
        ]

    def upper_bounds(self, schema: Schema) -> list[float]:
        """Numbers above which none of its integers is."""
        return [
            *self._numbers(schema, _UPPER[:1]),
            *(n - 1 for n in self._numbers(schema, _UPPER[1:])),
        ]

    def _numbers(self, schema: Schema, keywords: tuple[str, ...]) -> list[float]:
        found = (part.get(keyword) for part in self.parts(schema) for keyword in keywords)
        return [n for n in found if isinstance(n, int | float) and not isinstance(n, bool)]


def listed(value: Any) -> list[Any]:
    """A list as it is; an empty one for anything else."""
    return value if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """A mapping as it is; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
