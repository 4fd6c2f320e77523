"""How a constrained output can be brought to its end in few tokens.

A grammar does not tell its shortest text. Here one is looked for by going on with what ends
something, where that is allowed: brackets and quotation marks that close, the members that an
object has to have and no others, the shortest values. What is found is a way to the end, not always
the shortest; a pattern's text is found where trying characters in turn finds it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagewire_engine.json_position import JsonPosition
from pagewire_engine.reasoning_span import ReasoningMarks
from pagewire_engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_TOKENS = 1024
# Calls of llguidance, some microseconds each, that one search may make, and what a mask counts as.
MOST_TRIES = 16_384
_TRIES_OF_A_MASK = 64
# Places of a known way that are tried for each token of a search.
_MOST_RESTS = 6
_MOST_NAMES = 256
_MOST_NAME_TOKENS = 128
# Outside of strings, in this order; what a number or another grammar may need comes last.
_ENDS = ("}", "]", ":", ",")
_VALUES = ("null", '"', "0", "1", "false", "true", "[", "{", "-")
_NUMBER = frozenset(b"-.0123456789")
# The last before a member's name, or another value.
_SEPARATOR = re.compile(rb"([{,])[^{,]*$")
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

    Attributes:
        is_json: see above.
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
        self._one = self._known(("1",))
        digits = self._known("0123456789")
        self._digits = digits if len(digits) == 10 else []
        self._closers = self._known(_CLOSERS)
        self._plain = np.array(self._known(_PLAIN), np.int64)

    def shortest(
        self,
        matcher: LLMatcher,
        position: JsonPosition,
        most: int = _MOST_TOKENS,
        *,
        in_reasoning: bool = False,
        tries: Tries | None = None,
        known: Sequence[int] = (),
    ) -> list[int] | None:
        """Tokens that end the output, the end-of-sequence id last; None where none were found.

        Args:
            matcher: after the output so far; it is not moved.
            position: in JSON, after the same.
            most: tokens, at most 1024.
            in_reasoning: the output ends within reasoning, whose end comes first.
            tries: how many calls of llguidance may yet be made; None: as many as one search may.
            known: a way from somewhere near: the search is over where it leads into that.
        """
        tries = tries or Tries(MOST_TRIES)
        if in_reasoning:
            follower = matcher.deep_copy()
            if not follower.consume_tokens(self._reasoning_end):
                return None
            most -= len(self._reasoning_end)
            answer = self.shortest(follower, position, most, tries=tries, known=known)
            return None if answer is None else self._reasoning_end + answer
        most = min(most, _MOST_TOKENS)
        if self.is_json:
            return self._found(_Search(matcher, position, self._tokens, tries), most, known)
        # Closing first is short where it leads to an end.
        given = tries.left // 2
        half = Tries(given)
        closing = _Search(matcher, position, self._tokens, half, self._closers)
        path = self._found(closing, most, known)
        tries.left -= given - half.left
        if path is not None:
            return path
        return self._found(_Search(matcher, position, self._tokens, tries), most, known)

    def _found(self, search: _Search, most: int, known: Sequence[int]) -> list[int] | None:
        path: list[int] = []
        while len(path) < most and search.tries.left > 0:
            if search.matcher.is_accepting():
                return [*path, self._eos]
            step = search.matcher.compute_ff_tokens() or self._next(search, most - len(path))
            if not step or len(path) + len(step) > most:
                return None
            rest = search.rest_of(known, step[0], most - len(path))
            if rest is not None:
                return path + rest
            if not search.go(step):
                return None
            path += step
        return None

    def _next(self, search: _Search, num_left: int) -> list[int] | None:
        """What is tried next; None where nothing is known that could follow.

        Args:
            search: so far.
            num_left: tokens that may follow.
        """
        position = search.position
        if not self.is_json:
            return search.first(search.closers) or search.plain_or_any(self._plain)
        if search.begins_another_name:
            # Not the name of another member: no two are chosen with as many tokens left.
            number = [self._digits[int(digit)] for digit in str(num_left)] if self._digits else []
            if number and search.allows(number):
                return number
        if position.in_string:
            return search.first(self._quote) or search.plain_or_any(self._plain)
        if position.awaits_name and search.since_separator:
            named = search.first_name(self._names)
            if named is not None:
                return named
        if (ends := search.first(self._ends)) is not None:
            return ends
        # `-0.` does not end by zeros alone where it has to be below zero.
        digit = search.first(self._one) if search.in_number else None
        return digit or search.first(self._values) or search.plain_or_any(self._plain)

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
        self.in_number = False
        self.begins_another_name = False
        self._is_first_member = False
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
        if not was_in_string and (separated := _SEPARATOR.search(text)):
            self._is_first_member = separated[1] == b"{"
        self.begins_another_name = (
            self.position.in_string
            and self.position.awaits_name
            and not self._is_first_member
            and text[-1:] == b'"'
        )
        self.in_number = bool(text) and text[-1] in _NUMBER and not self.position.in_string
        if was_in_string != self.position.in_string:
            self._used.clear()
        return True

    def rest_of(self, way: Sequence[int], token_id: int, most: int) -> list[int] | None:
        """A rest of a way that begins with a token, is a way from here and has no more than so many
        tokens; None where none is found."""
        start = max(0, len(way) - most) - 1
        for _ in range(_MOST_RESTS):
            try:
                start = way.index(token_id, start + 1)
            except ValueError:
                return None
            if self.allows(rest := [*way[start:]]):
                return rest
        return None

    def first(self, token_ids: Iterable[int]) -> list[int] | None:
        """The first of these that is allowed."""
        return next(([n] for n in token_ids if self.allows([n])), None)

    def first_name(self, names: Sequence[list[int]]) -> list[int] | None:
        """The first of these members that may come. They mostly come in the order in which they are
        required: it is gone on from the last."""
        for offset in range(len(names)):
            number = (self._next_name + offset) % len(names)
            if self.allows(names[number]):
                self._next_name = number + 1
                return names[number]
        return None

    def plain_or_any(self, token_ids: npt.NDArray[np.int64]) -> list[int] | None:
        """Of those that are allowed the one that was chosen least: `a*b` does not end by `a`. Where
        none is, the shortest token of all that are, and of those the first."""
        self.tries.left -= _TRIES_OF_A_MASK
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)
        bits = mask[token_ids >> 5] >> (token_ids & 31).astype(np.uint32) & 1
        allowed = token_ids[bits != 0].tolist()
        if not allowed:
            chosen = self._tokens.shortest_of(mask)
            return None if chosen is None else [chosen]
        chosen = min(allowed, key=self._used.__getitem__)
        self._used[chosen] += 1
        return [chosen]

    def allows(self, token_ids: list[int]) -> bool:
        """Whether all these may follow, one after the other."""
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
