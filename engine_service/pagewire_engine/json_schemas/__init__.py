"""JSON schemas as they are compiled: without annotations, in the words that llguidance has."""

from __future__ import annotations

import json
from typing import Any

from pagewire_engine.json_schemas.document import Document
from pagewire_engine.json_schemas.growth import most_growth
from pagewire_engine.json_schemas.narrowing import Narrowing
from pagewire_engine.json_schemas.places import Place, unique_places

__all__ = ["Place", "most_growth", "normalised_schema", "places_of_unique_items"]


def places_of_unique_items(text: str) -> Place | None:
    """Where items have to differ, which `normalised_schema` leaves out; None where nowhere."""
    document = Document(text)
    return unique_places(document) if document.is_one else None


def normalised_schema(text: str, *, lenient: bool = False) -> str:
    """The schema's JSON text for llguidance. What meets it meets the schema too.

    Args:
        text: the schema.
        lenient: leave out what can't be kept.

    Raises:
        InvalidArgumentError: it is not JSON, no schema, nested too deeply, or can't be kept.
    """
    document = Document(text)
    schema: dict[str, Any] = document.root
    if document.is_one:
        schema = Narrowing(document, lenient=lenient).rewritten()
    # What llguidance takes for settings of its own: white space without bounds, say, or no `oneOf`.
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    return json.dumps(schema, ensure_ascii=False)
