"""Schemas that are meant to hurt: each is refused in bounded time, or what is written under it is
valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import StructuredOutput
from pagewire_engine.structured_output import GrammarCompiler
from tests.fakes.constrained_walks import EOS, VOCAB_SIZE, StuckError, walk
from tests.fakes.fake_engine_client import byte_tokenizer

# More than a trial may take on a slow machine, with the start of its process.
WAIT_S = 120.0
MAX_TOKENS = 400


def nested(depth: int, keyword: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {keyword: schema} if keyword == "not" else {"type": "array", keyword: schema}
    return schema


def doubled(depth: int, keyword: str) -> dict[str, Any]:
    """Each definition holds the next twice: 2 ** depth branches."""
    definitions: dict[str, Any] = {f"d{depth}": {"type": "integer"}}
    for n in range(depth):
        next_ = {"$ref": f"#/$defs/d{n + 1}"}
        definitions[f"d{n}"] = {keyword: [next_, {"type": "array", "items": next_}]}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def members(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


HOSTILE: dict[str, Any] = {
    "arrays 90 deep": nested(90),
    "arrays 500 deep": nested(500),
    "not 50 deep": nested(50, "not"),
    "enum of 20,000": {"enum": [f"value {n}" for n in range(20_000)]},
    "enum of long texts": {"enum": ["x" * 5000 + str(n) for n in range(40)]},
    "enum of objects": {"enum": [{"a": [n, {"b": "c" * n}]} for n in range(300)]},
    "enum of nothing": {"enum": []},
    "refers to itself": {"$ref": "#"},
    "refers in a ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    | {"$ref": "#/$defs/a"},
    "must hold itself": members({"a": {"$ref": "#"}}),
    "may hold itself": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "tree": {"type": "array", "items": {"$ref": "#"}},
    "refers nowhere": {"$ref": "#/$defs/none"},
    "refers elsewhere": {"$ref": "http://127.0.0.1:1/x.json"},
    "refers to a file": {"$ref": "file:///etc/passwd"},
    "anyOf doubled 12 times": doubled(12, "anyOf"),
    "anyOf doubled 40 times": doubled(40, "anyOf"),
    "allOf doubled 12 times": doubled(12, "allOf"),
    "oneOf doubled 12 times": doubled(12, "oneOf"),
    "anyOf of 2,000": {"anyOf": [members({f"p{n}": {"const": n}}) for n in range(2000)]},
    "oneOf of 200 alike": {"oneOf": [members({"a": text(maxLength=n)}) for n in range(200)]},
    "allOf of 300 patterns": {"allOf": [text(pattern=f"a{{{n}}}") for n in range(300)]},
    "minLength 10^9": text(minLength=10**9),
    "minLength 10^30": text(minLength=10**30),
    "minLength -1": text(minLength=-1),
    "maxLength 10^9": text(maxLength=10**9),
    "maxLength 50,000 of a pattern": text(maxLength=50_000, pattern="^(a|b)*$"),
    "minLength over maxLength": text(minLength=5, maxLength=4),
    "minItems 10^9": {"type": "array", "minItems": 10**9},
    "maxItems 10^9": {"type": "array", "maxItems": 10**9, "items": {"type": "null"}},
    "minItems unique booleans": {"type": "array", "minItems": 3, "uniqueItems": True}
    | {"items": {"type": "boolean"}},
    "minProperties 10^6": {"type": "object", "minProperties": 10**6},
    "minContains 10^6": {"contains": {"const": 1}, "minContains": 10**6},
    "minimum 10^400": {"type": "integer", "minimum": 10**400},
    "minimum over maximum": {"type": "number", "minimum": 2, "maximum": 1},
    "multipleOf 10^-300": {"type": "number", "multipleOf": 1e-300},
    "multipleOf a prime": {"type": "integer", "multipleOf": 1_000_003},
    "pattern of powers": text(pattern="^(a+)+$"),
    "pattern of 10^12": text(pattern="^((((a{1000}){1000}){1000}){1000})$"),
    "pattern that remembers": text(pattern=r"^(a*)b\1$"),
    "pattern that looks": text(pattern="^(?=.*a)(?=.*b).*$"),
    "pattern of intersections": text(pattern="(a|b)*a(a|b){400}"),
    "pattern that is none": text(pattern="(((("),
    "pattern of all letters": text(pattern="^[\u00e0-\u017f]{1,300}$"),
    "names in escapes": members(
        {"\u0000\u001f": {}, 'q"\\': {}, "\U0001f600": {"const": "ü\u2028"}}
    ),
    "name of 100,000": members({"n" * 100_000: {"type": "null"}}),
    "names alike": members({"é": {"const": 1}, "e\u0301": {"const": 2}}),
    "names that clash": members({"ab": {"type": "integer"}})
    | {"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}},
    "names that can't": members({"ab": {"type": "integer"}})
    | {"patternProperties": {"^a": {"type": "string"}}},
    "3,000 members": members({f"p{n}": {"type": "boolean"} for n in range(3000)}),
    "3,000 optional": {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}},
    "dependents in a ring": {"type": "object", "properties": {"a": {}, "b": {}}}
    | {"dependentRequired": {"a": ["b"], "b": ["a"]}},
    "type of no kind": {"type": "strin"},
    "keywords of wrong kinds": {"type": "object", "properties": [], "required": {"a": 1}},
    "guidance's own words": {"type": "string", "x-guidance": {"whitespace_pattern": "(a+)+"}},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode()}
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


def compiled_or_refused(
    compiler: GrammarCompiler, schema: Any
) -> tuple[StructuredOutput | None, InvalidArgumentError | None]:
    try:
        constraint = StructuredOutput(json_schema=json.dumps(schema))
        compiler.start(constraint).result(timeout=WAIT_S)
    except InvalidArgumentError as error:
        return None, error
    return constraint, None


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_or_kept(compiler: GrammarCompiler, name: str) -> None:
    schema = HOSTILE[name]
    constraint, refusal = compiled_or_refused(compiler, schema)
    if refusal is not None:
        assert refusal.field == "structured_output.json_schema"
        assert 0 < len(refusal.message) < 1000
        return
    assert constraint is not None
    vocabulary = compiler._token_bytes
    assert vocabulary is not None
    for seed in range(2):
        matcher = compiler.matcher(constraint, MAX_TOKENS)
        try:
            output = walk(matcher, vocabulary.of, EOS, seed, MAX_TOKENS)
        except StuckError:
            continue
        if output is not None:
            jsonschema.validate(json.loads(output), schema)


@pytest.mark.slow
def test_others_are_served_after_all_of_them(compiler: GrammarCompiler) -> None:
    constraint = StructuredOutput(json_schema='{"const": "still here"}')
    assert compiler.start(constraint).result(timeout=WAIT_S)
