"""JSON schemas as they are compiled: what is an annotation by the specification is left out."""

from __future__ import annotations

import json
from typing import Any

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import DATA_KEYWORDS, MAPS_OF_SCHEMAS

# Levels of nested JSON; llguidance itself reads 128.
MAX_DEPTH = 100
# The values of `format` that llguidance enforces. By Draft 2020-12 a format is an annotation, and
# one that is not known is to be ignored.
_FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    )
)


def normalised_schema(text: str) -> str:
    """The schema's JSON text without formats that are not known.

    Raises:
        InvalidArgumentError: it is not JSON, no schema, or nested too deeply.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _wrong(f"is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise _wrong(f"is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _wrong("must be a JSON object")
    return json.dumps(_normalised(schema, 0), ensure_ascii=False)


def _normalised(value: Any, depth: int) -> Any:
    """A schema, or a list of schemas, or what stands in its place."""
    if depth > MAX_DEPTH:
        raise _wrong(f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_normalised(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if key == "format" and isinstance(item, str) and item not in _FORMATS:
            continue
        if key in DATA_KEYWORDS:
            kept[key] = item
        elif key in MAPS_OF_SCHEMAS and isinstance(item, dict):
            kept[key] = {name: _normalised(each, depth + 2) for name, each in item.items()}
        else:
            kept[key] = _normalised(item, depth + 1)
    return kept


def _wrong(message: str) -> InvalidArgumentError:
    return InvalidArgumentError("structured_output.json_schema", message)
