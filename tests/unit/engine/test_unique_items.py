"""Items of an array differ where its schema says so, and no output ends in a place from which
nothing could follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.grammars import make_vocabulary
from pagewire_engine.mask_filling import fill_masks
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.token_bytes import TokenBytes
from pagewire_engine.worker.grammar_masks import GrammarMasks
from pagewire_engine.worker.sampler import SamplingRow
from tests.fakes.constrained_walks import fill, walk
from tests.fakes.fake_engine_client import byte_tokenizer, ids_of

EOS, VOCAB_SIZE = 258, 259
TOKENIZER_JSON = byte_tokenizer().to_str().encode()
TOKENS = TokenBytes(make_vocabulary(TOKENIZER_JSON, VOCAB_SIZE, [EOS])).of


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    files = {"tokenizer.json": TOKENIZER_JSON}
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def constraint(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(schema))


def allowed(compiler: GrammarCompiler, schema: dict[str, Any], text: str) -> set[str]:
    """The characters that may follow; "" for the end."""
    params = SamplingParams(structured_output=constraint(schema))
    row = SamplingRow(1, 0, 0, 7, params, [1], ids_of(text))
    told = GrammarMasks(compiler, VOCAB_SIZE, [EOS]).masks([row])
    assert not told.refused
    flags = np.unpackbits(told.bits.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    ids = [int(n) for n in np.flatnonzero(flags)]
    return {"" if n == EOS else c for n in ids for c in CHARACTERS.get(n, ["?"])}


CHARACTERS = {ids_of(chr(n))[0]: [chr(n)] for n in range(128)} | {EOS: [""]}

TEXTS = unique({"type": "string", "maxLength": 2})
FEW = unique({"enum": ["a", "ab", "b", 1, None]})
PAIRS = unique(
    {
        "type": "object",
        "properties": {"k": {"enum": ["a", "b"]}, "v": {"enum": ["x", "y"]}},
        "required": ["k", "v"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("schema", "text", "may", "may_not"),
    [
        (TEXTS, '["a","a', set("b"), set('"')),
        (TEXTS, '["ab","cd"', set(",]"), set()),
        # At "ab" it would have to end.
        (TEXTS, '["ab","a', set('c"'), set()),
        (unique({"type": "string", "pattern": "^[ab]{2}$"}), '["ab","a', set("a"), set("b")),
        (FEW, '["a","b",', set('"1n'), set()),
        (FEW, '["a","b","a', set("b"), set('"')),
        (FEW, '["a","ab","', set("b"), set("a")),
        (FEW, '["a","ab","b",', set("1n"), set('"')),
        (FEW, '["a","ab","b",1,null', set("]"), set(",")),
        (unique({"type": "number"}), "[1,1", set(".0e"), set(",]")),
        (unique({"type": "number"}), "[1,1.0", set("1"), set(",]")),
        (unique({"type": "integer", "minimum": 0, "maximum": 11}), "[1,1", set("01"), set(",]")),
        (unique({"type": "integer"}), "[-0,", set("-1"), set("0")),
        (PAIRS, '[{"k":"a","v":"x"},{"k":"a","v":"', set("y"), set("x")),
        # No value is left with that key.
        (
            PAIRS,
            '[{"k":"a","v":"x"},{"k":"a","v":"y"},{"k":"',
            set("b"),
            set("a"),
        ),
        (unique({}), '[{"a": 1, "b": [2]},{"b":[2 ],"a":1', set(",1."), set("}")),
        (unique({}), '[true,"true",1,[],{},[[]],[', set("1"), set("]")),
        (unique(unique({"enum": ["a", "b"]})), '[["a"],["a"', set(","), set("]")),
        (
            {"type": "object", "properties": {"u": unique({}), "v": {"type": "array"}}},
            '{"u":[1],"v":[1,1',
            set(",]"),
            set(),
        ),
        ({"anyOf": [{"type": "object"}, unique({}, minItems=1)]}, "[1,2,2", set("0."), set(",]")),
    ],
    ids=range(20),
)
def test_a_token_after_which_items_would_be_the_same_is_not_allowed(
    compiler: GrammarCompiler, schema: dict[str, Any], text: str, may: set[str], may_not: set[str]
) -> None:
    found = allowed(compiler, schema, text)
    assert may <= found
    assert not may_not & found


HARD = [
    {"enum": ["a", "ab", "abc", "b"]},
    {"type": "boolean"},
    {"enum": [1, 2, "1", None, True]},
    {"type": "integer", "minimum": 0, "maximum": 12},
    {"type": "string", "pattern": "^[AB]{2}$"},
    {"type": "string", "maxLength": 2},
    {"type": "number"},
    {"type": "string", "format": "date"},
    PAIRS["items"],
    {"type": "object", "additionalProperties": {"enum": ["a", "b"]}, "maxProperties": 2},
    {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    unique({"enum": ["a", "b", "c"]}, minItems=2),
    {"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
]


@pytest.mark.parametrize("items", HARD, ids=range(len(HARD)))
def test_outputs_have_no_item_twice_however_often_the_sampler_tries(
    compiler: GrammarCompiler, items: dict[str, Any]
) -> None:
    """The walk writes again what it wrote, and goes on until all values are used up."""
    lists = {"type": "object", "properties": {"x": unique(items), "y": unique(items, maxItems=3)}}
    lists |= {"required": ["x", "y"], "additionalProperties": False}
    num_items = 0
    for seed in range(5):
        output = walk(compiler.matcher(constraint(lists)), TOKENS, EOS, seed, most=400)
        if output is not None:
            value = json.loads(output)
            jsonschema.validate(value, lists)
            num_items += len(value["x"])
    assert num_items


def test_a_place_taken_up_again_allows_what_it_did(compiler: GrammarCompiler) -> None:
    schema = unique({"enum": ["a", "ab", "b", "ba"]})
    text = '["b","ab","ba","a"]'
    grown = compiler.matcher(constraint(schema))
    for cut, token_id in enumerate(ids_of(text)):
        anew = compiler.matcher(constraint(schema))
        anew.advance(ids_of(text[:cut]))
        masks = [np.zeros(-(-VOCAB_SIZE // 32), np.uint32) for _ in range(2)]
        fill(grown, masks[0])
        fill(anew, masks[1])
        assert (masks[0] == masks[1]).all()
        grown.advance([token_id])
    assert grown.fault() is None


def test_two_arrays_have_values_of_their_own(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"x": unique({"enum": ["a", "b"]}), "y": unique({"enum": ["c", "d"]})},
        "required": ["x", "y"],
    }
    matcher = compiler.matcher(constraint(schema))
    for token_id in ids_of('{"x":["b","a"],"y":["c","d"]}'):
        mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
        fill(matcher, mask)
        assert mask[token_id // 32] >> np.uint32(token_id % 32) & 1
        matcher.advance([token_id])


def test_rows_filled_together_are_as_each_alone(compiler: GrammarCompiler) -> None:
    schema = unique({"enum": ["a", "ab", "b"]})
    texts = ['["a","', '["b","', '["a","ab","', "["]
    together = [compiler.matcher(constraint(schema)) for _ in texts]
    for matcher, text in zip(together, texts, strict=True):
        matcher.advance(ids_of(text))
    bits = np.zeros((len(texts), -(-VOCAB_SIZE // 32)), np.uint32)
    fill_masks(together, bits, bits.ctypes.data)
    for row, text in zip(bits, texts, strict=True):
        alone = compiler.matcher(constraint(schema))
        alone.advance(ids_of(text))
        mask = np.zeros_like(row)
        fill(alone, mask)
        assert (mask == row).all()
