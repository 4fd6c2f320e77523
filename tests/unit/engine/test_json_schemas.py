"""Schemas are put into the grammar's words: what comes out of one always meets the schema that was
sent, as jsonschema sees it, and what can't be put so is refused."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from pagewire.errors import InvalidArgumentError
from tests.fakes.constrained_walks import EOS, Grammars, StuckError, walk

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


AB: Schema = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}},
    "additionalProperties": False,
}
KINDS: Schema = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y", "z"]}, "n": {"type": "integer"}},
    "required": ["kind"],
    "additionalProperties": False,
}
LEGACY = "http://json-schema.org/draft-04/schema#"
CASES: list[tuple[str, Schema, list[Any], list[Any]]] = [
    (
        "one of disjoint types",
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        ["x", 1],
        [1.5, None],
    ),
    (
        "one of tagged objects",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"const": name}, name: {"type": "integer"}},
                    "required": ["t", name],
                    "additionalProperties": False,
                }
                for name in ("p", "q")
            ]
        },
        [{"t": "p", "p": 1}, {"t": "q", "q": 1}],
        [{"t": "p", "q": 1}],
    ),
    (
        "one of objects that overlap: each without the other",
        AB | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 1}, {"c": 1}],
    ),
    (
        "one of a type and one of its values",
        {"oneOf": [{"type": "string"}, {"enum": ["on", "off", 1]}]},
        ["other", 1, "onn"],
        ["on", "off"],
    ),
    (
        "not having members",
        AB | {"not": {"required": ["a", "b"]}},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    (
        "not one of some texts",
        {"type": "string", "not": {"enum": ["no", "nor", ""]}},
        ["n", "north", "yes"],
        ["no", "nor", ""],
    ),
    ("not a type", {"not": {"type": ["string", "object"]}}, [1, [], None], ["x", {}]),
    (
        "nothing, for a member that is not to be",
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}},
        [{"b": None}, {}],
        [{"a": 1}],
    ),
    (
        "if, then, else",
        KINDS
        | {
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": False}},
        },
        [{"kind": "x", "n": 1}, {"kind": "y"}],
        [{"kind": "x"}, {"kind": "y", "n": 1}],
    ),
    (
        "several conditions",
        KINDS
        | {
            "allOf": [
                {"if": {"properties": {"kind": {"const": kind}}}, "then": {"properties": {"n": n}}}
                for kind, n in (("x", {"const": 1}), ("y", {"const": 2}))
            ]
        },
        [{"kind": "x", "n": 1}, {"kind": "y", "n": 2}, {"kind": "z", "n": 7}, {"kind": "x"}],
        [{"kind": "x", "n": 2}, {"kind": "y", "n": 1}],
    ),
    (
        "dependencies, as they were written once",
        AB | {"$schema": LEGACY, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}},
        [{}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}],
        [{"a": 1}, {"c": 1}, {"b": 1, "c": 1}],
    ),
    (
        "more dependencies than can be told apart",
        AB | {"dependentRequired": {"a": ["b"], "b": ["a"], "c": ["a"], "d": ["a"]}},
        [{}, {"a": 1, "b": 1, "c": 1}],
        [{"a": 1}, {"c": 1}],
    ),
    (
        "names by a pattern",
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]{2}$"},
            "additionalProperties": {"type": "integer"},
        },
        [{"ab": 1}, {}],
        [{"abc": 1}, {"ab": "x"}],
    ),
    (
        "names of some",
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}},
        [{"x": 1}, {"x": 1, "y": []}],
        [{"z": 1}],
    ),
    (
        "names of a length",
        {"type": "object", "properties": {"long": {}}, "propertyNames": {"maxLength": 3}},
        [{"abc": 1}],
        [{"long": 1}, {"abcd": 1}],
    ),
    (
        "at least one member",
        AB | {"minProperties": 1},
        [{"a": 1}, {"c": 1}, {"a": 1, "b": 2}],
        [{}],
    ),
    ("at most one member", AB | {"maxProperties": 1}, [{}, {"a": 1}, {"c": 1}], [{"a": 1, "b": 1}]),
    (
        "nothing that is not evaluated",
        {
            "allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}],
            "properties": {"b": {"type": "integer"}},
            "unevaluatedProperties": False,
        },
        [{"a": 1, "b": 1}],
        [{"c": 1}],
    ),
    (
        "an array that contains",
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}},
        [[5], [7, 1]],
        [[], [1]],
    ),
    (
        "texts that do not begin with certain ones",
        {"type": "string", "pattern": "^(?!x-|y$)[a-z-]+$"},
        ["a", "x", "ya"],
        ["x-a", "y", ""],
    ),
    (
        "names that do not begin with certain ones",
        {
            "type": "object",
            "patternProperties": {"^(?!x-).*": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{"a": 1, "x-a": "s"}],
        [{"a": "s"}, {"x-a": 1}],
    ),
    (
        "words of an old draft",
        {
            "$schema": LEGACY,
            "type": "array",
            "items": [{"type": "integer", "minimum": 3, "exclusiveMinimum": True}],
            "additionalItems": False,
        },
        [[4], []],
        [[3], [4, 4]],
    ),
    (
        "siblings of a reference, which old drafts ignore",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"s": {"type": "string"}},
            "properties": {"a": {"$ref": "#/definitions/s", "maxLength": 1}},
        },
        [{"a": "long"}],
        [{"a": 1}],
    ),
    (
        "references into what is rewritten",
        {
            "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}},
            "additionalProperties": {"$ref": "#/properties/a/oneOf/0"},
        },
        [{"a": None, "z": "s"}],
        [{"z": None}],
    ),
    (
        "a base of its own that nothing refers to",
        {
            "$id": "http://a.test/root.json",
            "properties": {
                "a": {"$id": "/properties/a", "oneOf": [{"type": "string"}, {"type": "null"}]}
            },
        },
        [{"a": None}],
        [{"a": 1}],
    ),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_keyword_that_the_grammar_lacks_is_kept(
    grammars: Grammars, schema: Schema, good: list[Any], bad: list[Any]
) -> None:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    assert all(validator(schema).is_valid(value) for value in good)
    assert not any(validator(schema).is_valid(value) for value in bad)
    assert [value for value in good if not grammars.accepts(schema, value)] == []
    assert [value for value in bad if grammars.accepts(schema, value)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "string", "format": "uri"}]}, "oneOf of"),
        ({"type": "integer", "not": {"multipleOf": 2}}, "not of"),
        ({"type": "array", "contains": {"type": "null"}, "maxContains": 1}, "contains of"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-a"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "minItems": 2}, "minItems"),
        ({"unevaluatedItems": False, "type": "array"}, "unevaluatedItems"),
        ({"$ref": "other.json"}, "other.json"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_can_not_be_kept_is_refused_by_name_and_left_out_where_that_is_asked_for(
    grammars: Grammars, schema: Schema, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        grammars.compiled(schema)
    if "of" in message:
        assert grammars.compiled(schema, lenient=True)


SCALARS = st.sampled_from(
    [
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": 0, "maximum": 30},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", "ab", 1, None]},
        {"const": "a"},
        {"type": "string", "pattern": "^(a|ab)$"},
        {"type": ["string", "integer"], "maxLength": 2, "maximum": 12},
    ]
)
NAMES = ("a", "b", "c")


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=2)
    return st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, min_size=1),
            "additionalProperties": st.just(False),
        },
        optional={
            "required": names,
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
            "dependentRequired": st.dictionaries(st.sampled_from(NAMES), names, max_size=2),
            "dependentSchemas": st.dictionaries(
                st.sampled_from(NAMES), st.builds(lambda n: {"required": n}, names), max_size=1
            ),
            "propertyNames": st.sampled_from([{"enum": ["a", "c"]}, {"pattern": "^[ab]"}]),
            "not": st.builds(lambda n: {"required": n}, names),
            "oneOf": st.lists(st.builds(lambda n: {"required": n}, names), min_size=2, max_size=3),
        },
    )


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 4)},
        optional={"uniqueItems": st.booleans(), "minItems": st.integers(0, 2), "contains": inner},
    )


def composed(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    pairs = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda some: {"oneOf": some}, pairs),
        st.builds(lambda some, other: {"anyOf": some, "not": other}, pairs, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, b: {"allOf": [a], "if": b, "then": a}, inner, inner),
    )


SCHEMAS = st.recursive(SCALARS, composed, max_leaves=8)


@given(schema=SCHEMAS, seed=st.integers(0, 1 << 16))
@hypothesis_settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_under_a_schema_meets_it(
    grammars: Grammars, schema: Schema, seed: int
) -> None:
    try:
        grammar = grammars.compiled(schema)
    except InvalidArgumentError:
        return
    try:
        output = walk(grammar.matcher(), grammars.tokens.of, EOS, seed, most=300)
    except StuckError:
        return
    if output is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(output))


def test_most_of_such_schemas_are_kept_and_written_to_their_end(grammars: Grammars) -> None:
    """The test above would pass if all were refused."""
    for _, schema, _, _ in CASES:
        grammar = grammars.compiled(schema)
        outputs = [walk(grammar.matcher(), grammars.tokens.of, EOS, seed) for seed in range(4)]
        assert any(output is not None for output in outputs), schema
        validator = jsonschema.validators.validator_for(
            schema, default=jsonschema.Draft202012Validator
        )
        for output in outputs:
            if output is not None:
                validator(schema).validate(json.loads(output))
