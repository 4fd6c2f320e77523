"""A JSON schema's text: what it is by its draft, and where its references lead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import DATA_KEYWORDS, MAPS_OF_SCHEMAS

Schema = Any
"""A boolean, or a mapping of keywords."""

# Levels of nested JSON; llguidance itself reads 128.
MAX_DEPTH = 100
NEWEST_DRAFT = 2020
_DRAFT = re.compile(r"json-schema\.org/(?:draft-0?(\d)|draft/(\d{4})-\d\d)/")


class Document:
    """A schema, and what is looked up in it.

    Args:
        text: JSON.

    Attributes:
        root: the schema.
        draft: 3 to 7, 2019 or 2020, by `$schema`; without one it is the newest.
        is_one: no part of it has a base of its own which references count from.

    Raises:
        InvalidArgumentError: it is not JSON, no schema, or nested too deeply.
    """

    def __init__(self, text: str) -> None:
        self.root: dict[str, Any] = _parsed(text)
        _check_depth(self.root, 0)
        named = _DRAFT.search(str(self.root.get("$schema", "")))
        self.draft = int(named[1] or named[2]) if named else NEWEST_DRAFT
        self._base = _own_id(self.root).removesuffix("#")
        self._anchors: dict[str, Schema] = {}
        self.is_one = True
        has_references = has_bases = False
        for schema in subschemas(self.root):
            has_references = has_references or "$ref" in schema
            if isinstance(anchor := schema.get("$anchor"), str):
                self._anchors[anchor] = schema
            if schema is self.root:
                continue
            own = _own_id(schema)
            if own.startswith("#"):
                self._anchors[own[1:]] = schema
            has_bases = has_bases or bool(own and not own.startswith("#"))
        self.is_one = not (has_references and has_bases)

    @property
    def ignores_siblings_of_references(self) -> bool:
        """What stands beside a `$ref` means nothing."""
        return self.draft <= 7

    def target(self, reference: str) -> Schema | None:
        """The schema that a reference means; None where it is not in this document."""
        if self._base and reference.startswith(self._base):
            reference = reference.removeprefix(self._base) or "#"
        if not reference.startswith("#"):
            return None
        pointer = unquote(reference[1:])
        if not pointer.startswith("/"):
            return self.root if pointer == "" else self._anchors.get(pointer)
        place: Any = self.root
        for step in pointer[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and step in place:
                place = place[step]
            elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
                place = place[int(step)]
            else:
                return None
        return place if isinstance(place, dict | bool) else None


def subschemas(schema: Schema) -> Iterator[dict[str, Any]]:
    """The mappings in a schema that are schemas themselves, the schema first."""
    if isinstance(schema, list):
        for item in schema:
            yield from subschemas(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in DATA_KEYWORDS:
            continue
        if (key in MAPS_OF_SCHEMAS or key == "dependencies") and isinstance(value, dict):
            for item in value.values():
                yield from subschemas(item)
        else:
            yield from subschemas(value)


def wrong(message: str) -> InvalidArgumentError:
    """The error about a schema that can't be served."""
    return InvalidArgumentError("structured_output.json_schema", message)


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise wrong(f"is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise wrong(f"is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise wrong("must be a JSON object")
    return schema


def _check_depth(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise wrong(f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        _check_depth(item, depth + 1)


def _own_id(schema: dict[str, Any]) -> str:
    own = schema.get("$id", schema.get("id"))
    return own if isinstance(own, str) else ""
