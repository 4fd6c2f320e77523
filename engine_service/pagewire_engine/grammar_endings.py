"""How a constrained output can be brought to its end in few tokens.

A grammar does not tell its shortest text. Here one is looked for by going on with what ends
something, where that is allowed: brackets and quotation marks that close, the members that an
object has to have and no others, the shortest values. What is found is a way to the end, not always
the shortest; a pattern's text is found where trying characters in turn finds it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagewire_engine.json_position import JsonPosition
from pagewire_engine.reasoning_span import ReasoningMarks
from pagewire_engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_TOKENS = 1024
# Calls of llguidance, some microseconds each, that one search may make, and what a mask counts as.
MOST_TRIES = 16_384
_TRIES_OF_A_MASK = 64
_MOST_NAMES = 256
_MOST_NAME_TOKENS = 128
# Outside of strings, in this order; what a number or another grammar may need comes last.
_ENDS = ("}", "]", ":", ",")
_VALUES = ("null", '"', "0", "1", "false", "true", "[", "{", "-")
# What ends something in texts that are no JSON.
_CLOSERS = ">)]}\"';.\n"
_PLAIN = (
    "-_.:/@ 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    "+#%&=?!~*'()[]{}<>,;|$^`\\\n"
)


class GrammarEndings:
    """Finds ways to the end under one grammar. Keeps nothing between calls.

    Args:
        vocabulary: the model's.
        tokens: its tokens' bytes.
        grammar: what was compiled: the names of members that objects must have are read from it.
        is_json: whether outputs are JSON.
        marks: of the reasoning before them; None where there is none.
    """

    def __init__(
        self,
        vocabulary: LLTokenizer,
        tokens: TokenBytes,
        grammar: str,
        *,
        is_json: bool,
        marks: ReasoningMarks | None = None,
    ) -> None:
        self._eos = vocabulary.eos_token
        self._tokens = tokens
        self.is_json = is_json
        names = _required_names(grammar) if is_json else []
        written = (_ids(vocabulary, json.dumps(n, ensure_ascii=False) + ":") for n in names)
        self._names = [ids for ids in written if len(ids) <= _MOST_NAME_TOKENS]
        self._reasoning_end: list[int] = []
        if marks is not None and marks.end_token is not None:
            self._reasoning_end = [marks.end_token]
        elif marks is not None:
            self._reasoning_end = _ids(vocabulary, f"\n{marks.end}\n\n")
        # Within names and strings, what ends them comes first.
        self._quote = self._known(('"',))
        self._ends = self._known(_ENDS)
        self._values = self._known(_VALUES)
        self._closers = self._known(_CLOSERS)
        self._plain = self._known(_PLAIN)

    def shortest(
        self,
        matcher: LLMatcher,
        position: JsonPosition,
        most: int = _MOST_TOKENS,
        *,
        in_reasoning: bool = False,
        tries: Tries | None = None,
    ) -> list[int] | None:
        """Tokens that end the output, the end-of-sequence id last; None where none were found.

        Args:
            matcher: after the output so far; it is not moved.
            position: in JSON, after the same.
            most: tokens, at most 1024.
            in_reasoning: the output ends within reasoning, whose end comes first.
            tries: how many calls of llguidance may yet be made; None: as many as one search may.
        """
        tries = tries or Tries(MOST_TRIES)
        if in_reasoning:
            follower = matcher.deep_copy()
            if not follower.consume_tokens(self._reasoning_end):
                return None
            most -= len(self._reasoning_end)
            answer = self.shortest(follower, position, most, tries=tries)
            return None if answer is None else self._reasoning_end + answer
        most = min(most, _MOST_TOKENS)
        if self.is_json:
            return self._found(_Search(matcher, position, self._tokens, tries), most)
        # Closing first is short where it leads to an end.
        given = tries.left // 2
        half = Tries(given)
        path = self._found(_Search(matcher, position, self._tokens, half, self._closers), most)
        tries.left -= given - half.left
        return path or self._found(_Search(matcher, position, self._tokens, tries), most)

    def _found(self, search: _Search, most: int) -> list[int] | None:
        path: list[int] = []
        while len(path) < most and search.tries.left > 0:
            if search.matcher.is_accepting():
                return [*path, self._eos]
            step = search.matcher.compute_ff_tokens() or self._next(search)
            if not step or len(path) + len(step) > most or not search.go(step):
                return None
            path += step
        return None

    def _next(self, search: _Search) -> list[int] | None:
        """What is tried next; None where nothing is known that could follow."""
        position = search.position
        if not self.is_json:
            return (
                search.first(search.closers)
                or search.least_used(self._plain)
                or search.any_allowed()
            )
        if position.in_string:
            return (
                search.first(self._quote) or search.least_used(self._plain) or search.any_allowed()
            )
        if position.awaits_name and search.since_separator:
            named = search.first_name(self._names)
            if named is not None:
                return named
        return (
            search.first(self._ends)
            or search.first(self._values)
            or search.least_used(self._plain)
            or search.any_allowed()
        )

    def _known(self, texts: Iterable[str]) -> list[int]:
        by_bytes = self._tokens.by_bytes
        return [by_bytes[text.encode()][0] for text in texts if text.encode() in by_bytes]


class Tries:
    """Calls of llguidance that may yet be made.

    Attributes:
        left: so many; less than 0 where the last took more than were left.
    """

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class _Search:
    """One search: a matcher that is moved, and what was chosen within the present string."""

    def __init__(
        self,
        matcher: LLMatcher,
        position: JsonPosition,
        tokens: TokenBytes,
        tries: Tries,
        closers: Sequence[int] = (),
    ) -> None:
        self.matcher = matcher.deep_copy()
        self.position = position.copy()
        self.closers = closers
        self.tries = tries
        self.since_separator = True
        self._tokens = tokens
        self._used: Counter[int] = Counter()
        self._next_name = 0

    def go(self, token_ids: Sequence[int]) -> bool:
        """Goes on with tokens; False where they are not allowed after all."""
        if not self.matcher.consume_tokens(list(token_ids)):
            return False
        was_in_string = self.position.in_string
        text = b"".join(self._tokens.of[n] for n in token_ids)
        self.position.read(text)
        self.since_separator = text[-1:] in (b"{", b",")
        if was_in_string != self.position.in_string:
            self._used.clear()
        return True

    def first(self, token_ids: Iterable[int]) -> list[int] | None:
        """The first of these that is allowed."""
        return next(([n] for n in token_ids if self._is_allowed([n])), None)

    def first_name(self, names: Sequence[list[int]]) -> list[int] | None:
        """The first of these members that may come. They mostly come in the order in which they are
        required: it is gone on from the last."""
        for offset in range(len(names)):
            number = (self._next_name + offset) % len(names)
            if self._is_allowed(names[number]):
                self._next_name = number + 1
                return names[number]
        return None

    def least_used(self, token_ids: Iterable[int]) -> list[int] | None:
        """Of those that are allowed the one that was chosen least: `a*b` does not end by `a`."""
        allowed = [n for n in token_ids if self._is_allowed([n])]
        if not allowed:
            return None
        chosen = min(allowed, key=self._used.__getitem__)
        self._used[chosen] += 1
        return [chosen]

    def any_allowed(self) -> list[int] | None:
        """A token of what the mask allows: the shortest, and of those the first."""
        self.tries.left -= _TRIES_OF_A_MASK
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)
        chosen = self._tokens.shortest_of(mask)
        return None if chosen is None else [chosen]

    def _is_allowed(self, token_ids: list[int]) -> bool:
        self.tries.left -= 1
        return self.matcher.validate_tokens(token_ids) == len(token_ids)


def _required_names(grammar: str) -> list[str]:
    """The names in all lists of required members."""
    names: dict[str, None] = {}
    left: list[Any] = [json.loads(grammar)]
    while left and len(names) < _MOST_NAMES:
        each = left.pop()
        if isinstance(each, list):
            left += reversed(each)
        elif isinstance(each, dict):
            left += reversed(each.values())
            required = each.get("required")
            if isinstance(required, list):
                names |= dict.fromkeys(name for name in required if isinstance(name, str))
    return list(names)[:_MOST_NAMES]


def _ids(vocabulary: LLTokenizer, text: str) -> list[int]:
    return list(vocabulary.tokenize_bytes(text.encode()))
