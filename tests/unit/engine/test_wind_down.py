"""Outputs that are brought to their end before `max_tokens` cuts them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from pagewire.structured_output import StructuredOutput
from pagewire_engine import end_watch, wind_down
from pagewire_engine.grammar_endings import GrammarEndings, Tries
from pagewire_engine.grammar_matcher import CompiledGrammar, Matcher
from pagewire_engine.json_position import JsonPosition
from pagewire_engine.json_schemas import most_growth
from pagewire_engine.token_bytes import numbers_of
from tests.fakes.constrained_walks import EOS, Grammars, fill
from tests.fakes.fake_engine_client import ids_of


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


def grammar_of(grammars: Grammars, **constraint: Any) -> CompiledGrammar:
    return grammars.of(StructuredOutput(**constraint))


def allowed(matcher: Matcher) -> list[int]:
    bits = np.zeros(9, np.uint32)
    fill(matcher, bits)
    assert matcher.fault() is None
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return [int(n) for n in np.flatnonzero(flags)]


def written(grammars: Grammars, matcher: Matcher, most: int, like: str, seed: int = 0) -> bytes:
    """What a model writes that likes these characters more than any end; with `<cut>` at the end
    where it was cut."""
    choose, output = random.Random(seed), b""
    for _ in range(most):
        options = allowed(matcher)
        if options == [EOS]:
            return output
        options = [n for n in options if n != EOS]
        liked = [n for n in options if grammars.tokens.of[n].decode(errors="replace") in like]
        chosen = choose.choice(liked or options)
        output += grammars.tokens.of[chosen]
        matcher.advance([chosen])
    return output + b"<cut>"


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "rest": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "rest"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3},
    {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 2},
    {"type": "object", "properties": {"ü": {"const": "ß"}, "b": {"enum": ["xy", "xyz"]}}}
    | {"required": ["b", "ü"]},
    {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}}
    | {"required": ["id"]},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3}-[0-9]{2}$"}},
    {"type": "array", "items": {"type": "integer", "minimum": 1000, "maximum": 9999}},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date-time"}}}
    | {"required": ["when"]},
    TREE,
    {},
]


@pytest.mark.parametrize("like", ['"[{,:', "abc\\ ", "0123.", '{"valuerst:['])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_whatever_a_model_likes_its_output_ends(
    grammars: Grammars, schema: dict[str, Any], like: str
) -> None:
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    for most in (90, 250):
        for seed in range(2):
            text = written(grammars, grammar.matcher(most), most, like, seed)
            assert not text.endswith(b"<cut>"), text
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("like", ["abc\\ ", '"[{,:ü'])
@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {}, {"type": "array", "items": SCHEMAS[3] | {"maxProperties": 2}}],
    ids=["string", "any", "array"],
)
def test_as_few_tokens_as_an_output_takes_suffice(
    grammars: Grammars, schema: dict[str, Any], like: str
) -> None:
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    least = len(written(grammars, grammar.matcher(3), 99, "", 0)) + 1  # and its end
    for most in range(least, 32):
        for seed in range(3):
            text = written(grammars, grammar.matcher(most), most, like, seed)
            assert not text.endswith(b"<cut>"), (most, text)
            jsonschema.validate(json.loads(text), schema)


def _object_of(*names: str, required: bool = True) -> dict[str, Any]:
    members = {name: {"type": "string"} for name in names}
    least = list(names) if required else []
    return {"type": "object", "properties": members, "required": least} | {
        "additionalProperties": False
    }


def _of_kind(kind: Any, *names: str) -> dict[str, Any]:
    found = _object_of("kind", *names)
    found["properties"]["kind"] = {"const": kind}
    return found


BIG = _object_of(*(f"member_{number}" for number in range(6)))
# What may be begun takes far more than the shortest output.
STEEP: dict[str, dict[str, Any]] = {
    "items": {"type": "array", "items": BIG},
    "members": {"type": "object", "properties": {"a": BIG, "b": BIG}}
    | {"additionalProperties": False},
    "values": {"type": "array", "items": {"enum": ["a" * 80, "b" * 100, "c"]}},
    "names": {"type": "object", "properties": {"a": {"type": "integer"}, "b": BIG}}
    | {"additionalProperties": False},
    "beginnings": {"type": "object", "properties": {"k": {"enum": ["a", "b" * 100]}}}
    | {"required": ["k"]},
    "least_items_apart": {"type": "array"}
    | {"items": {"allOf": [{"type": "array", "minItems": 3}, {"items": _object_of("a", "b")}]}},
    "required_others": {"type": "array"}
    | {"items": {"type": "object", "required": ["a", "b"], "additionalProperties": BIG}},
    "escaped": {"type": "array", "items": {"type": "string", "pattern": '^(a|"{16})$'}},
    "below_zero": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}},
    "names_alike": {"type": "array"}
    | {"items": {"anyOf": [_object_of("a"), _object_of("ab", *BIG["properties"])]}},
    "kinds_alike": {"type": "array"}
    | {"items": {"anyOf": [_of_kind("a", "x"), _of_kind("ab", "x", *BIG["properties"])]}},
}


@pytest.mark.parametrize("like", ['"[{,:b', '{"member_0:,}', '[{"kind:true-0.,}'])
@pytest.mark.parametrize("schema", STEEP.values(), ids=STEEP)
def test_nothing_long_is_begun_too_late(
    grammars: Grammars, schema: dict[str, Any], like: str
) -> None:
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    for most in (40, 60, 90, 110, 160, 260):
        text = written(grammars, grammar.matcher(most), most, like, seed=most)
        assert not text.endswith(b"<cut>"), (most, text)
        jsonschema.validate(json.loads(text), schema)


def test_a_literal_that_decides_what_else_there_has_to_be_is_tried(grammars: Grammars) -> None:
    schema = {"anyOf": [_of_kind(False), _of_kind(True, *"abcdefgh")]}
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    for most in range(30, 90, 3):
        text = written(grammars, grammar.matcher(most), most, '{"kind:tru', seed=most)
        assert not text.endswith(b"<cut>"), (most, text)


@pytest.mark.parametrize("most", [60, 75, 90])
def test_a_quotation_mark_after_a_backslash_ends_no_string(grammars: Grammars, most: int) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 3}
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    for seed in range(8):
        text = written(grammars, grammar.matcher(most), most, "\\ab", seed)
        assert not text.endswith(b"<cut>"), text


@pytest.mark.parametrize("begun", ["", "{", '{"":null,', '{"a":null , "', '{"":null,"x'])
@pytest.mark.parametrize("least", [2, 3, 12])
def test_members_that_have_no_names_of_their_own_get_different_ones(
    grammars: Grammars, least: int, begun: str
) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": least}
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    matcher, position = grammar.inner.deep_copy(), JsonPosition()
    assert matcher.consume_tokens(ids_of(begun))
    position.read(begun.encode())
    way = grammar._ending.endings.shortest(matcher, position)
    assert way is not None
    text = begun.encode() + b"".join(grammars.tokens.of[token_id] for token_id in way)
    assert len(json.loads(text)) == least, text


@pytest.mark.parametrize("like", [" \n\t", ", \n", "1,"])
@pytest.mark.parametrize("items", [[1, 2, 3, 4], ["red", "green", "blue"]])
def test_items_that_have_to_differ_end_whatever_a_model_likes(
    grammars: Grammars, items: list[Any], like: str
) -> None:
    schema = {"type": "array", "items": {"enum": items}, "uniqueItems": True, "minItems": 2}
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    for most in range(40, 90):
        text = written(grammars, grammar.matcher(most), most, like, seed=most)
        assert not text.endswith(b"<cut>"), (most, text)
        jsonschema.validate(json.loads(text), schema)


LIGHT_OR_HEAVY = {
    "$defs": {
        "any": {"anyOf": [{"$ref": "#/$defs/light"}, {"$ref": "#/$defs/heavy"}]},
        "light": {"type": "object", "properties": {"l": {"$ref": "#/$defs/some"}}}
        | {"required": ["l"], "additionalProperties": False},
        "heavy": {
            "type": "object",
            "properties": {"h": {"$ref": "#/$defs/some"}, **BIG["properties"]},
            "required": ["h", *BIG["required"]],
            "additionalProperties": False,
        },
        "some": {"type": "array", "items": {"$ref": "#/$defs/any"}},
    },
    "$ref": "#/$defs/any",
}


@pytest.mark.parametrize("most", [500, 600])
def test_what_is_as_deep_as_something_that_has_ended_may_take_more(
    grammars: Grammars, most: int
) -> None:
    grammar = grammar_of(grammars, json_schema=json.dumps(LIGHT_OR_HEAVY))
    matcher, text = grammar.matcher(most), '{"l":[' * 12 + "]}" * 11 + "," + '{"h":[' * 8
    num_written = 0
    for token_id in grammars.vocabulary.tokenize_str(text):
        if token_id not in allowed(matcher):
            break
        matcher.advance([token_id])
        num_written += 1
    left = most - num_written
    assert not written(grammars, matcher, left, '{"h:[').endswith(b"<cut>")


def _lengthened(grammars: Grammars, grammar: CompiledGrammar, seed: int, most: int) -> int:
    """By how much one allowed token lengthens the way to the end at most, along one output."""
    endings, tokens = grammar._ending.endings, grammars.tokens.of
    matcher, position = grammar.matcher().inner, JsonPosition()
    choose, worst = random.Random(seed), 0
    for _ in range(most):
        way = endings.shortest(matcher, position)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        options = [n for n in numbers_of(bits) if n < len(tokens) and tokens[n]]
        if way is None or not options:
            break
        for token_id in choose.sample(options, min(len(options), 20)):
            follower, then = matcher.deep_copy(), position.copy()
            assert follower.consume_token(token_id)
            then.read(tokens[token_id])
            longer = endings.shortest(follower, then)
            assert longer is not None
            worst = max(worst, len(longer) - len(way))
        chosen = choose.choice([n for n in options if tokens[n] in b'"{[,:'] or options)
        matcher.consume_token(chosen)
        position.read(tokens[chosen])
    return worst


@pytest.mark.parametrize(
    "schema", [*SCHEMAS, *STEEP.values()], ids=lambda schema: json.dumps(schema)[:40]
)
def test_no_token_lengthens_the_way_by_more_than_is_known(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    grammar = grammar_of(grammars, json_schema=json.dumps(schema))
    known = grammar._ending.growth
    assert known is not None
    assert max(_lengthened(grammars, grammar, seed, 25) for seed in range(2)) <= known


@pytest.mark.parametrize(
    ("schema", "growth"),
    [
        ({"type": "object", "additionalProperties": False}, 3),
        ({"type": "array", "items": {"enum": ["a" * 40, "b"]}}, 47),
        ({"type": "string", "pattern": "^(a|b{30})$"}, 33),
        ({"anyOf": [{"type": "null"}, {"type": "array", "minItems": 9}]}, 39),
        ({"type": "string", "pattern": '^"{9}$'}, 57),
        ({"type": "string", "pattern": "^(a|я{9})$"}, 57),
        ({"type": "number", "maximum": 1e-10}, 27),
        ({"type": "number", "maximum": 1e-20}, None),
        ({"type": "string", "pattern": r"^(a)\1$"}, None),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, None),
        ({"not": {"type": "string"}}, None),
        (
            {"type": "array", "items": {"type": "array", "minItems": 1 << 40}, "minItems": 1 << 40},
            None,
        ),
    ],
    ids=str,
)
def test_by_how_much_a_token_lengthens_the_way(schema: dict[str, Any], growth: int | None) -> None:
    assert most_growth(schema, len) == growth


def test_an_output_is_not_watched_while_none_of_its_tokens_could_take_all_that_is_left(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []
    search = GrammarEndings.shortest

    def counted(*args: Any, **more: Any) -> list[int] | None:
        searches.append(1)
        return search(*args, **more)

    grammar = grammar_of(grammars, json_schema=json.dumps(TREE))
    monkeypatch.setattr(GrammarEndings, "shortest", counted)
    text = '{"value":"a","rest":[{"value":"b","rest":[]},{"value":"cd","rest":[]}]}'
    matcher = grammar.matcher(2000)
    for token_id in grammars.vocabulary.tokenize_str(text):
        allowed(matcher)
        matcher.advance([token_id])
    assert not searches


@pytest.mark.parametrize(
    ("constraint", "most", "like"),
    [
        ({"regex": "[a-z ]+"}, 20, "abc"),
        ({"regex": "(ab)*c"}, 31, "ab"),
        ({"choice": ("yes", "yesterday and the day before")}, 12, "yesterday"),
        ({"grammar": 'start: "<" (/[a-z]/ | start)+ ">"'}, 60, "abc<"),
        ({"json_object": True}, 64, 'abc<{":'),
    ],
)
def test_other_constraints_end_too(
    grammars: Grammars, constraint: dict[str, Any], most: int, like: str
) -> None:
    grammar = grammar_of(grammars, **constraint)
    assert not written(grammars, grammar.matcher(most), most, like).endswith(b"<cut>")
    assert written(grammars, grammar.matcher(), most, like).endswith(b"<cut>")


def test_a_string_may_take_all_the_room_that_there_is(grammars: Grammars) -> None:
    grammar = grammar_of(grammars, json_schema='{"type": "string"}')
    text = written(grammars, grammar.matcher(50), 50, "abc")
    assert 40 <= len(text) < 50


def test_nothing_changes_for_an_output_that_has_room(grammars: Grammars) -> None:
    grammar = grammar_of(grammars, json_schema=json.dumps(TREE))
    text = '{"value":"a","rest":[{"value":"b","rest":[]},{"value":"cd","rest":[]}]}'
    held, free = grammar.matcher(3 * len(text)), grammar.matcher()
    for token_id in grammars.vocabulary.tokenize_str(text):
        assert allowed(held) == allowed(free)
        held.advance([token_id])
        free.advance([token_id])
    assert allowed(held) == [EOS]


def test_a_matcher_that_is_made_anew_allows_the_same(grammars: Grammars) -> None:
    grammar, most = grammar_of(grammars, json_schema=json.dumps(TREE)), 300
    matcher, choose = grammar.matcher(most), random.Random(3)
    output: list[int] = []
    while (options := allowed(matcher)) != [EOS]:
        if len(output) % 7 == 0:
            again = grammar.matcher(most)
            again.advance(output)
            assert allowed(again) == options
        output.append(choose.choice([n for n in options if n != EOS]))
        matcher.advance(output[-1:])
    assert len(output) > 100


MANY = {
    "type": "object",
    "properties": {
        "kinds": {"type": "array", "maxItems": 12, "items": {"enum": list("abcdefghijklmn")}},
        "code": {"type": "string", "pattern": "^[a-f]{12}$"},
    },
    "required": ["kinds", "code"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("share", [64, 512])
def test_one_that_has_used_up_its_tries_allows_the_same_when_made_anew(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    for module, name in (
        (end_watch, "_TRIES_OF_A_TOKEN"),
        (end_watch, "_TRIES_OF_A_SEQUENCE"),
        (wind_down, "_TRIES_OF_A_MASK"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // share)
    grammar, most = grammar_of(grammars, json_schema=json.dumps(MANY)), 80
    for seed in range(6):
        matcher, choose = grammar.matcher(most), random.Random(seed)
        output: list[int] = []
        while (options := allowed(matcher)) != [EOS] and len(output) < most:
            again = grammar.matcher(most)
            again.advance(output)
            assert allowed(again) == options
            output.append(choose.choice([n for n in options if n != EOS]))
            matcher.advance(output[-1:])


def test_a_token_takes_no_more_tries_than_it_may(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tries] = []

    def counted(left: int) -> Tries:
        given.append(Tries(left))
        return given[-1]

    for module in (wind_down, end_watch):
        monkeypatch.setattr(module, "Tries", counted)
    grammar = grammar_of(grammars, json_schema=json.dumps(MANY))
    written(grammars, grammar.matcher(60), 60, "abcdef")
    assert len(given) > 20
    # A search stops once it has none left: past that, by what its last character took.
    assert min(tries.left for tries in given) > -200
    assert max(tries.left for tries in given) <= 4096


def test_what_can_not_end_in_time_is_left_alone(grammars: Grammars) -> None:
    grammar = grammar_of(grammars, json_schema='{"type": "array", "minItems": 40}')
    assert written(grammars, grammar.matcher(30), 30, "[a").endswith(b"<cut>")
    assert written(grammars, grammar.matcher(), 30, "[a").endswith(b"<cut>")


def test_a_position_knows_names_from_values() -> None:
    position = JsonPosition()
    told = []
    for char in b'{"a\\"":["b",{"c":0}],"d"':
        position.read(bytes([char]))
        told.append("s" if position.in_string else "n" if position.awaits_name else ".")
    assert "".join(told) == "nssssn..ss..nssn....nssn"
