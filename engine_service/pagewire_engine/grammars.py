"""llguidance, as far as it is used here: vocabulary, grammar texts, and matchers.

Imported where the first constraint is compiled, and by `grammar_trial`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.structured_output import FIELD, StructuredOutput
from pagewire_engine.end_watch import Ending
from pagewire_engine.grammar_endings import GrammarEndings
from pagewire_engine.grammar_matcher import CompiledGrammar
from pagewire_engine.json_position import JsonPosition
from pagewire_engine.json_schemas import (
    Place,
    most_growth,
    normalised_schema,
    places_of_unique_items,
)
from pagewire_engine.reasoning_span import ReasoningMarks
from pagewire_engine.token_bytes import TokenBytes
from pagewire_engine.unique_items import UniqueItems

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MOST_REASON_CHARACTERS = 500
# One space or two, or a line break with an indent: what JSON is printed with. Models that are free
# to write white space without end sometimes do.
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": r"[ ]{1,2}|\r?\n[ \t]{0,32}"}
_WHITE_SPACE = {"whitespace_pattern", "whitespace_flexible"}
# A schema within a Lark grammar, and what may look like one: strings, expressions, comments.
_LARK_PIECES = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*(?P<brace>\{)')
NO_TEXT = "no text satisfies it"
_ANY_OBJECT = '{"type": "object"}'


def make_vocabulary(
    tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """The vocabulary as llguidance reads it, in a second or so.

    Raises:
        FailedPreconditionError: it is of a kind that llguidance does not read.
    """
    try:
        content = json.loads(tokenizer_json)
        content["truncation"] = content["padding"] = content["post_processor"] = None
        _hide_control_tokens(content)
        text = json.dumps(content, ensure_ascii=False)
        return LLTokenizer(
            text, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=_slices()
        )
    except Exception as error:  # pyo3 raises several kinds, ValueError among them
        raise FailedPreconditionError(
            f"the model's tokenizer does not serve constraints on outputs: {reason(str(error))}",
            field=FIELD,
        ) from error


def _slices() -> list[str]:
    """Sets of tokens that are allowed or not as a whole, most of the time: llguidance's own, and
    letters and digits, of which formats and patterns allow any number where they do not allow all
    that a string may have. Masks within addresses of mail take a third of the time by it."""
    return ["[a-zA-Z0-9]+", *LLTokenizer.general_slices()]


def _hide_control_tokens(content: dict[str, Any]) -> None:
    """Gives control tokens names in a `tokenizer.json` that nobody can write.

    Where only one text can follow, llguidance tokenizes it and allows its first token alone. A text
    such as `<|im_end|>`, in a choice or a constant, has to come out as plain tokens.
    """
    secret = secrets.token_hex(8)
    names: dict[str, str] = {}
    for token in content.get("added_tokens") or ():
        if token.get("special"):
            names[token["content"]] = token["content"] = f"<{token['id']} {secret}>"
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]


def control_token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """The control tokens of a `tokenizer.json`, by their texts."""
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


def grammar_text(
    constraint: StructuredOutput, control_tokens: Mapping[str, int] = MappingProxyType({})
) -> str:
    """The constraint as llguidance reads it.

    Args:
        constraint: what the output is held to.
        control_tokens: the model's, by their texts: reasoning may stand between two of them.

    Raises:
        InvalidArgumentError: it is none; the grammar itself is looked at by `compiled`.
    """
    answer = _answer_text(constraint)
    marks = ReasoningMarks.of(constraint, control_tokens)
    return answer if marks is None else _after_reasoning(answer, marks)


def _pattern_of(text: str) -> str:
    """A Lark grammar's pattern of just this text."""
    pattern = re.escape(text).replace("/", r"\/")
    for char, name in (("\n", "n"), ("\r", "r"), ("\t", "t"), ("\v", "x0b"), ("\f", "x0c")):
        pattern = pattern.replace("\\" + char, "\\" + name)
    return pattern


def _after_reasoning(answer: str, marks: ReasoningMarks) -> str:
    """A grammar of reasoning and, after some white space, the answer's."""
    if answer.startswith("{"):
        (grammar,) = json.loads(answer)["grammars"]
    else:
        grammar = {"lark_grammar": answer}
    grammar["name"] = "answer"
    if marks.end_token is None:
        end = _pattern_of(marks.end)
        reasoning = [f"reasoning[lazy]: /(?s:.*){end}/"]
    else:
        reasoning = [f"reasoning: TEXT? <[{marks.end_token}]>", "TEXT: /(?s:.+)/"]
    if marks.start is None:
        start = "start: reasoning answer"
    else:
        opened = (
            json.dumps(marks.start) if marks.start_token is None else f"<[{marks.start_token}]>"
        )
        start = f"start: SPACE? {opened} reasoning answer | answer"
    lines = [start, *reasoning, "answer: SPACE? @answer", r"SPACE: /[ \t\r\n]{1,4}/"]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, grammar]})


def _answer_text(constraint: StructuredOutput) -> str:
    if constraint.json_object:
        return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_JSON_DEFAULTS)
    if constraint.json_schema is not None:
        schema = normalised_schema(constraint.json_schema, lenient=constraint.lenient)
        overrides: JsonCompileOptions = {"lenient": True} if constraint.lenient else {}
        try:
            return LLMatcher.grammar_from_json_schema(
                schema, defaults=_JSON_DEFAULTS, overrides=overrides
            )
        except ValueError as error:
            raise _wrong(constraint, str(error)) from None
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.choice:
        texts = (json.dumps(text, ensure_ascii=False) for text in constraint.choice)
        # One terminal: as alternatives of a rule, at most 2000 of them can be followed at once.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
    try:
        lark = any_to_lark(constraint.grammar or "")
    except RecursionError:
        raise _wrong(constraint, "it is nested too deeply") from None
    except Exception as error:  # the converter's own, which has no public base
        raise _wrong(constraint, str(error)) from None
    return LLMatcher.grammar_from_lark(_with_bounded_space(lark))


def _with_bounded_space(lark: str) -> str:
    """A Lark grammar whose `%json` schemas have our white space, where they ask for no other."""
    pieces: list[str] = []
    end = 0
    for match in _LARK_PIECES.finditer(lark):
        if match["brace"] is None or match.start() < end:
            continue
        start = match.start("brace")
        try:
            schema, stop = json.JSONDecoder().raw_decode(lark, start)
        except (ValueError, RecursionError):
            continue  # the compiler tells
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict) or not _WHITE_SPACE.isdisjoint(own):
            continue  # asks for other, or the compiler tells
        bounded = json.dumps(schema | {"x-guidance": {**_JSON_DEFAULTS, **own}})
        pieces.append(lark[end:start] + bounded)
        end = stop
    return "".join([*pieces, lark[end:]])


def unique_places(constraint: StructuredOutput) -> Place | None:
    """Where the items of arrays have to differ, of which the grammar says nothing."""
    text = constraint.json_schema
    return None if text is None else places_of_unique_items(text)


def growth_of(constraint: StructuredOutput, grammar: str, vocabulary: LLTokenizer) -> int | None:
    """By how many tokens one may lengthen the way to the end of an output; None where that is not
    known: of texts that are no JSON, or come after reasoning.

    Args:
        constraint: what is compiled.
        grammar: its `grammar_text`.
        vocabulary: the model's.
    """
    is_json = constraint.json_object or constraint.json_schema is not None
    if not is_json or constraint.reasoning_end is not None:
        return None
    schema = json.loads(grammar)["grammars"][0]["json_schema"]
    return most_growth(schema, lambda text: len(vocabulary.tokenize_bytes(text.encode())))


def compiled(constraint: StructuredOutput, grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    """The matcher before the first token, of a `grammar_text`.

    Raises:
        InvalidArgumentError: the grammar is wrong, too large, or can't be satisfied.
    """
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        # A grammar that is too complex for its first mask is found out here.
        first_mask = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(first_mask.ctypes.data, first_mask.nbytes)
    if matcher.is_error():
        raise _wrong(constraint, matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        raise _wrong(constraint, NO_TEXT)
    return matcher


def compiled_grammar(
    constraint: StructuredOutput,
    grammar: str,
    vocabulary: LLTokenizer,
    tokens: TokenBytes,
    num_bytes: int = 0,
    control_tokens: Mapping[str, int] = MappingProxyType({}),
    growth: int | None = None,
) -> CompiledGrammar:
    """The matcher before the first token, with what else is watched.

    Args:
        constraint: what is compiled.
        grammar: its `grammar_text`.
        vocabulary: the model's.
        tokens: its tokens' bytes.
        num_bytes: about the memory that the matcher takes.
        control_tokens: see `grammar_text`.
        growth: see `most_growth`.

    Raises:
        InvalidArgumentError: see `compiled`.
    """
    matcher = compiled(constraint, grammar, vocabulary)
    place = unique_places(constraint)
    is_json = constraint.json_object or constraint.json_schema is not None
    marks = ReasoningMarks.of(constraint, control_tokens)
    endings = GrammarEndings(vocabulary, tokens, grammar, is_json=is_json, marks=marks)
    in_reasoning = marks is not None and marks.start is None
    first = endings.shortest(matcher, JsonPosition(), in_reasoning=in_reasoning)
    return CompiledGrammar(
        matcher,
        tokens,
        num_bytes=num_bytes,
        unique_items=None if place is None else UniqueItems(place, tokens),
        ending=Ending(endings, None if first is None else tuple(first), growth),
        reasoning=marks,
    )


def reason(error: str) -> str:
    """An error of llguidance's in one line, without what it tells of its insides."""
    error = error.split("<state>", 1)[0].replace("<non-verbose/>", "")
    text = " ".join(line.strip() for line in error.split("\n") if line.strip())
    if text.startswith("NoExtension"):
        return NO_TEXT
    if len(text) > _MOST_REASON_CHARACTERS:
        text = text[:_MOST_REASON_CHARACTERS] + "..."
    return text or "no reason is known"


def _wrong(constraint: StructuredOutput, error: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{FIELD}.{constraint.kind}", f"can't be served: {reason(error)}")
