"""Reasoning that comes before what a constraint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pagewire.structured_output import StructuredOutput
from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.grammars import compiled_grammar, grammar_text
from pagewire_engine.reasoning_span import ReasoningMarks, ReasoningSpan
from tests.fakes.constrained_walks import EOS, Grammars, fill
from tests.fakes.fake_engine_client import ids_of

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
UNIQUE = '{"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "uniqueItems": true}'
CONTROL_START, CONTROL_END = 256, 257
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": SCHEMA}, '{"a": 5}'),
    ({"json_object": True}, '{"a": 5}'),
    ({"json_schema": UNIQUE}, '["x","y"]'),
    ({"regex": "[a-c]+"}, "abc"),
    ({"choice": ("yes", "no")}, "no"),
    ({"grammar": 'start: "<" /[a-z]+/ ">"'}, "<xyz>"),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


def matcher_of(
    grammars: Grammars,
    constraint: dict[str, Any],
    *,
    start: str | None = None,
    end: str = "</think>",
    max_tokens: int | None = None,
    control: Mapping[str, int] | None = None,
) -> Matcher:
    made = StructuredOutput(**constraint, reasoning_start=start, reasoning_end=end)
    text = grammar_text(made, control or {})
    grammar = compiled_grammar(
        made, text, grammars.vocabulary, grammars.tokens, control_tokens=control or {}
    )
    return grammar.matcher(max_tokens)


def allowed(matcher: Matcher) -> set[int]:
    bits = np.zeros(9, np.uint32)
    fill(matcher, bits)
    assert matcher.fault() is None
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def goes(matcher: Matcher, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        if token_id not in allowed(matcher):
            return False
        matcher.advance([token_id])
    return True


@pytest.mark.parametrize(("constraint", "answer"), KINDS)
@pytest.mark.parametrize("thought", ["", 'so "a" {is [ ☃ </thin\\ \n', "<think>again"])
def test_any_text_may_come_before_its_end_and_only_the_constraints_after(
    grammars: Grammars, constraint: dict[str, Any], answer: str, thought: str
) -> None:
    matcher = matcher_of(grammars, constraint, max_tokens=1000)
    assert EOS not in allowed(matcher)
    assert goes(matcher, ids_of(f"{thought}\n</think>\n\n{answer}"))
    assert EOS in allowed(matcher)
    assert not goes(matcher_of(grammars, constraint), ids_of(f"x</think>\n{answer}</think>"))
    assert not goes(matcher_of(grammars, constraint), ids_of("x</think>!"))


@pytest.mark.parametrize("end", ["\n</think>\r\n", "a/b [c] (d)?\t", "\\n"])
def test_an_end_of_any_text(grammars: Grammars, end: str) -> None:
    matcher = matcher_of(grammars, {"choice": ("yes",)}, end=end)
    matcher.advance(ids_of("I think so" + end))
    assert allowed(matcher) <= set(ids_of("y \n\t\r"))
    matcher.advance(ids_of("yes"))
    assert allowed(matcher) == {EOS}


@pytest.mark.parametrize(("constraint", "answer"), KINDS)
def test_reasoning_that_the_prompt_has_not_begun_may_be_left_out(
    grammars: Grammars, constraint: dict[str, Any], answer: str
) -> None:
    for text in (answer, f"\n{answer}", f"<think>{answer}</think>{answer}"):
        matcher = matcher_of(grammars, constraint, start="<think>", max_tokens=1000)
        assert goes(matcher, ids_of(text))
        assert EOS in allowed(matcher)
    assert not goes(
        matcher_of(grammars, constraint, start="<think>"), ids_of(f"hm</think>{answer}")
    )


def test_control_tokens_mark_reasoning_where_the_model_has_them(grammars: Grammars) -> None:
    control = {"</think>": CONTROL_END}
    matcher = matcher_of(grammars, {"json_schema": SCHEMA}, control=control, max_tokens=300)
    assert goes(matcher, [*ids_of("plain </think> {"), CONTROL_END, *ids_of(' {"a": 1}')])
    assert EOS in allowed(matcher)
    assert CONTROL_END not in allowed(matcher)


def test_reasoning_is_ended_while_there_is_room_for_the_answer(grammars: Grammars) -> None:
    for control in ({}, {"</think>": CONTROL_END}):
        matcher = matcher_of(grammars, {"json_schema": SCHEMA}, max_tokens=120, control=control)
        output: list[int] = []
        while EOS not in (options := allowed(matcher)):
            output.append(next((n for n in ids_of("m") if n in options), min(options)))
            matcher.advance(output[-1:])
        text = b"".join(grammars.tokens.of[n] for n in output)
        assert 40 < len(text) - len(text.lstrip(b"m")) < 100
        assert len(output) < 120
        assert json.loads(text[text.rindex(b"{") :])


@pytest.mark.parametrize(
    ("start", "thought", "control", "least"),
    [
        (None, "é", {}, 36),
        (None, "mm☃", {"</think>": CONTROL_END}, 36),
        ("<think>", "<think>", {}, 36),
        ("<think>", "<think>é", {"</think>": CONTROL_END}, 36),
        ("<think>", "", {"<think>": CONTROL_START, "</think>": CONTROL_END}, 10),
    ],
)
def test_reasoning_is_ended_in_time_whatever_it_can_not_be_ended_within(
    grammars: Grammars, start: str | None, thought: str, control: Mapping[str, int], least: int
) -> None:
    """A character of several tokens, and a mark of reasoning."""
    begun = [CONTROL_START] if CONTROL_START in control.values() else ids_of(thought)
    for most in (*range(least, least + 9), 50, 64, 90):
        made: dict[str, Any] = {"start": start, "control": control, "max_tokens": most}
        matcher = matcher_of(grammars, {"json_schema": SCHEMA}, **made)
        output: list[int] = []
        while len(output) < most and (options := allowed(matcher)) != {EOS}:
            liked = [*begun, *ids_of("mm" + thought.removeprefix(start or "")) * most][len(output)]
            options -= {EOS}
            output.append(liked if liked in options else min(options))
            matcher.advance(output[-1:])
        assert len(output) < most, b"".join(grammars.tokens.of[n] for n in output)


def test_items_differ_after_reasoning_that_looks_like_them(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, {"json_schema": UNIQUE})
    assert goes(matcher, ids_of('["x","x","y"</think>["x","'))
    assert allowed(matcher) == set(ids_of("y"))


@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
@pytest.mark.parametrize("start", [None, "<think>"])
def test_the_answer_is_found_however_the_text_is_cut(start: str | None, pieces: int) -> None:
    text = (start or "").encode() + b"a </think <think> b</think> answer </think>!"
    span = ReasoningSpan(ReasoningMarks(start, "</think>"))
    answer = b"".join(span.read(5, text[n : n + pieces]) for n in range(0, len(text), pieces))
    assert answer == b" answer </think>!"
    assert span.is_over


@pytest.mark.parametrize("text", [b" {}", b"<thin {}", b"{}<think>"])
def test_without_reasoning_all_is_the_answer(text: bytes) -> None:
    span = ReasoningSpan(ReasoningMarks("<think>", "</think>"))
    assert b"".join(span.read(5, bytes([char])) for char in text) == text
