"""Where in a document's values the items of an array have to differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from pagewire_engine.json_schemas.disjoint import Facts, listed, mapping, value_key
from pagewire_engine.json_schemas.document import Document, Schema, subschemas
from pagewire_engine.json_schemas.patterns import texts_of

_BRANCHES = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else")
MOST_VALUES = 1024
# Names that are looked up again and again.
_MOST_KNOWN = 4096


class Place:
    """All that a schema may say of a value where one stands. What a branch says that is not taken
    counts too: it can't be told which are.

    Args:
        schemas: of the document, those that may apply.
        facts: about it.

    Attributes:
        is_unique: the items of an array here have to differ.
        items: the values that those items may have, where they are few: JSON text, and key.
    """

    __slots__ = ("_facts", "_item", "_known", "_schemas", "is_unique", "items")

    def __init__(self, schemas: Iterable[Schema], facts: Facts) -> None:
        self._facts = facts
        self._schemas = list(_all_parts(schemas, facts).values())
        self._known: dict[str, Place] = {}
        self._item: Place | None = None
        self.is_unique = any(part.get("uniqueItems") is True for part in self._schemas)
        self.items: tuple[tuple[str, str], ...] | None = None
        if self.is_unique:
            self.items = self._texts_of_items()

    def member(self, name: str) -> Place:
        """The place of an object's member."""
        known = self._known.get(name)
        if known is None:
            if not self._schemas:
                return self
            found: list[Schema] = []
            for part in self._schemas:
                found += self._facts.member(
                    {k: v for k, v in part.items() if k in _OF_MEMBERS}, name
                )
            known = Place(found, self._facts)
            if len(self._known) < _MOST_KNOWN:
                self._known[name] = known
        return known

    def item(self) -> Place:
        """The place of an array's items; all are taken for one."""
        if self._item is None:
            found: list[Schema] = []
            for part in self._schemas:
                for key in ("items", "additionalItems", "prefixItems", "contains"):
                    value = part.get(key)
                    found += value if isinstance(value, list) else [value]
            self._item = Place(found, self._facts) if found else self
        return self._item

    def _texts_of_items(self) -> tuple[tuple[str, str], ...] | None:
        for part in self._schemas:
            if isinstance(items := part.get("items"), dict):
                values = few_values(items, self._facts)
                # Their texts can be written in one way only.
                if values is not None and not any(
                    isinstance(v, list | dict | float) for v in values
                ):
                    return tuple((json.dumps(v, ensure_ascii=False), value_key(v)) for v in values)
        return None


def unique_places(document: Document) -> Place | None:
    """The place of the whole value; None where no items have to differ."""
    if not any(part.get("uniqueItems") is True for part in subschemas(document.root)):
        return None
    return Place([document.root], Facts(document))


def few_values(schema: Schema, facts: Facts) -> list[Any] | None:
    """All values of a schema, or more, where they can be listed; None where they are many."""
    if (values := facts.values(schema)) is not None:
        return values if len(values) <= MOST_VALUES else None
    for part in facts.parts(schema):
        if isinstance(pattern := part.get("pattern"), str) and facts.types(schema) == {"string"}:
            return texts_of(pattern)
    if facts.types(schema) == {"integer"}:
        lows, highs = facts.lower_bounds(schema), facts.upper_bounds(schema)
        if lows and highs and max(lows) > -MOST_VALUES and min(highs) - max(lows) < MOST_VALUES:
            return list(range(int(max(lows)), int(min(highs)) + 1))
    return None


_OF_MEMBERS = frozenset(("properties", "patternProperties", "additionalProperties"))


def _all_parts(schemas: Iterable[Schema], facts: Facts) -> dict[int, dict[str, Any]]:
    """What may apply where these do, by identity."""
    found: dict[int, dict[str, Any]] = {}
    to_do = list(schemas)
    while to_do:
        schema = to_do.pop()
        for part in facts.parts(schema):
            if id(part) in found:
                continue
            found[id(part)] = part
            to_do += itertools.chain.from_iterable(listed(part.get(key)) for key in _BRANCHES)
            to_do += [part[key] for key in _CONDITIONS if key in part]
            for key in ("dependentSchemas", "dependencies"):
                to_do += [
                    each for each in mapping(part.get(key)).values() if isinstance(each, dict)
                ]
    return found
