"""What an output must look like: one definition for every API and the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.errors import InvalidArgumentError

MAX_CONSTRAINT_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_MARK_CHARACTERS = 100
FIELD = "structured_output"
# Keywords of a JSON schema that hold schemas by names, and those that hold no schema.
MAPS_OF_SCHEMAS = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
DATA_KEYWORDS = frozenset(("const", "default", "enum", "example", "examples", "required"))
_TEXTS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the whole output; exactly one of the five is given.

    Whether a schema, an expression or a grammar makes sense is found out when it is compiled, by
    the engine; here only its type and size are checked (256 KiB of UTF-8).

    Attributes:
        json_schema: JSON that this schema (Draft 2020-12, as JSON text) allows. A mapping, or a
            pydantic model's class, is turned into text. Properties come in the schema's order.
        json_object: any JSON object.
        regex: text that this regular expression (Rust's syntax) matches from its first to its last
            character.
        choice: one of these texts, at most 4096.
        grammar: text of this grammar: Lark as llguidance knows it, or llama.cpp's GBNF.
        lenient: leave out what of the JSON schema can't be enforced, instead of refusing it.
        reasoning_end: the output begins with reasoning, which is any text up to this one, and what
            follows is what the constraint holds. None: it holds from the first token.
        reasoning_start: the reasoning begins with this text, or is left out; None: the prompt has
            begun it.
        fit_max_tokens: bring the output to its end before `max_tokens` cuts it: when the tokens
            that are left are about as many as the end needs, no item or member is begun any more
            but those that there must be, and strings are closed. Not with `ignore_eos`. Two that
            differ in nothing else are equal: they ask for the same texts.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    lenient: bool = False
    reasoning_start: str | None = None
    reasoning_end: str | None = None
    # They share what is compiled.
    fit_max_tokens: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        object.__setattr__(self, "choice", _as_choices(self.choice))
        for name in ("json_object", "lenient", "fit_max_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise _wrong(name, f"must be True or False, not {value!r:.80}")
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, f"must be text, not {value!r:.80}")
        given = [name for name in (*_TEXTS, "choice") if getattr(self, name) not in (None, ())]
        if self.json_object:
            given.append("json_object")
        if len(given) != 1:
            raise InvalidArgumentError(
                FIELD,
                "must have exactly one of json_schema, json_object, regex, choice and grammar, not "
                + (" and ".join(given) or "none"),
            )
        if self.lenient and self.json_schema is None:
            raise _wrong("lenient", "is for a json_schema only")
        _check_reasoning(self.reasoning_start, self.reasoning_end)
        texts = self.choice or (getattr(self, given[0]),)
        if not self.json_object:
            _check_texts(given[0], texts)

    @property
    def kind(self) -> str:
        """Which of the five is given, by its name."""
        if self.json_object:
            return "json_object"
        return "choice" if self.choice else next(n for n in _TEXTS if getattr(self, n) is not None)


def _check_reasoning(start: Any, end: Any) -> None:
    for name, value in (("reasoning_start", start), ("reasoning_end", end)):
        if value is None:
            continue
        if not isinstance(value, str) or not value.strip() or len(value) > MAX_MARK_CHARACTERS:
            raise _wrong(name, f"must be text of 1 to {MAX_MARK_CHARACTERS} characters")
        _check_texts(name, (value,))
    if start is not None and end is None:
        raise _wrong("reasoning_start", "needs a reasoning_end")


def _schema_text(schema: Any) -> Any:
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong("json_schema", f"is no JSON: {error}") from None


def _as_choices(choice: Any) -> tuple[str, ...]:
    if choice is None:
        return ()
    if isinstance(choice, str) or not isinstance(choice, Iterable):
        raise _wrong("choice", f"must be a list of texts, not {choice!r:.80}")
    choices = tuple(choice)
    if not all(isinstance(text, str) for text in choices):
        raise _wrong("choice", "must be texts")
    if len(choices) > MAX_CHOICES:
        raise _wrong("choice", f"holds {len(choices)} texts; at most {MAX_CHOICES} are allowed")
    if "" in choices:
        raise _wrong("choice", "an empty text can't be chosen")
    return choices


def _check_texts(name: str, texts: Iterable[str]) -> None:
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise _wrong(name, "has half of a surrogate pair") from None
    if size == 0:
        raise _wrong(name, "is empty")
    if size > MAX_CONSTRAINT_BYTES:
        raise _wrong(
            name, f"has {size} bytes, and at most {MAX_CONSTRAINT_BYTES} are allowed; shorten it"
        )


def _wrong(name: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{FIELD}.{name}", message)
