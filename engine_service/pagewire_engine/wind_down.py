"""Brings a constrained output to its end before `max_tokens` cuts it.

A way to the end is known from the time on at which it begins to matter: when fewer tokens are left
beyond it than one token may take, as far as that is known of a schema (`json_schemas.growth`). From
then on it is looked for again when the output has left it, and not while a string goes on that it
only has to close. The fewer tokens there are to spare, of those that are left, beyond that way, the
fewer are allowed:

- reasoning is ended where its end and the shortest answer leave about as much again for the answer;
- where only a few could follow, each that may begin something long is tried, near the end each, and
  those that lead to no end in time are not allowed;
- then no member of an object is begun but those that there must be, and an item of an array only
  where its end is in time;
- then none of either;
- at last the way alone is left, but for strings of free text, which end where it just fits.

Like a matcher this is a function of the sequence's tokens and of `max_tokens` alone: one that is
made anew goes through the same states again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagewire_engine.grammar_endings import GrammarEndings, Tries
from pagewire_engine.json_position import JsonPosition
from pagewire_engine.token_bytes import Bits, TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Tokens to spare. Below the first at the latest the way is followed token by token; before that,
# where it is not known what one token may take, it is looked at again when a quarter of them is
# spent. Below the others fewer and fewer tokens are allowed.
WATCHED = 256
# To spare beside what one token may begin, where that is known: another may begin a little more.
_SLACK = 8
# Tokens for which it is worth to lose the way: to find it again takes as long as to keep to it.
_WORTHWHILE = 8
# Below it whatever could follow is tried, before that outside of strings what may begin something
# long, or decide by a constant what else there has to be: the rest of a number takes no more.
_NEAR = 32
_MAY_BEGIN_MUCH = re.compile(rb'["{\[,:]|^\s*[tfn]')
_STRUCTURE = (b'"', b"{", b"}", b"[", b"]", b",", b":")
_MOST_SOFT, _SOFT_SHARE = 64, 8
_MOST_HARD, _HARD_SHARE = 16, 32
_LEAST_HARD = 3  # what a token may begin within a text: three more bytes of a character
_STRING_MARGIN = 3
_MOST_WAYS = 16
# A token mostly takes the place of none or some of the way's first.
_MOST_SKIPPED = 3
# Calls of llguidance, of some microseconds each, that may be made where the way is looked for again
# after a token, in all for a sequence, and for one mask: who needs more is cut. Those for masks are
# not added up: a matcher that is made anew is given all the tokens, and asked for no mask of them.
_TRIES_OF_A_TOKEN = 4096
_TRIES_OF_A_SEQUENCE = 1 << 16
_TRIES_OF_A_MASK = 2048
# Tokens of the way that are looked at while a string goes on.
_AFTER_STRING = 2
# How long it takes to look again where no way was found that fits.
_PAUSE = 32


class Ending(NamedTuple):
    """What is known of a grammar's ends.

    Attributes:
        endings: finds them.
        first: from the beginning to the end; None where none was found.
        growth: tokens by which one may lengthen the way to an end; None where that is not known.
    """

    endings: GrammarEndings
    first: tuple[int, ...] | None
    growth: int | None = None


class WindDown:
    """Watches one sequence.

    Args:
        ending: of its grammar.
        tokens: the vocabulary's.
        max_tokens: of the sequence's output.
    """

    __slots__ = (
        "_endings",
        "_growth",
        "_hard",
        "_is_json",
        "_lean",
        "_least_depth",
        "_near",
        "_next_look",
        "_num_left",
        "_position",
        "_soft",
        "_tokens",
        "_tries_left",
        "_watched",
        "_way",
        "_way_before",
    )

    def __init__(self, ending: Ending, tokens: TokenBytes, max_tokens: int) -> None:
        self._endings = ending.endings
        self._is_json, self._growth = ending.endings.is_json, ending.growth
        self._tokens = tokens
        self._position = JsonPosition()
        self._way = None if ending.first is None else list(ending.first)
        # The last that was known: much of it is mostly part of the next.
        self._way_before = self._way or []
        self._tries_left = _TRIES_OF_A_SEQUENCE
        self._num_left = max_tokens
        self._hard = min(_MOST_HARD, max(_LEAST_HARD, max_tokens // _HARD_SHARE))
        self._soft = min(_MOST_SOFT, max_tokens // _SOFT_SHARE)
        # An item may be about as long as the shortest output: begin none that does not fit.
        self._lean = min(WATCHED, self._soft + len(ending.first or ()))
        self._watched, self._near = WATCHED, _NEAR
        if self._growth is not None:
            self._watched = min(WATCHED, self._hard + self._growth + _SLACK)
            self._lean = min(self._watched, self._soft + self._growth)
            self._near = min(_NEAR, self._watched)
        self._next_look = max_tokens
        self._plan_next_look()
        self._least_depth = 1  # The way has what ends the whole value.

    def advance(
        self, token_id: int, text: bytes, matcher: LLMatcher, *, in_reasoning: bool
    ) -> None:
        """The sequence has gone on with a token.

        Args:
            token_id: the token.
            text: its bytes, but for those of reasoning.
            matcher: after it.
            in_reasoning: it ends within reasoning.
        """
        self._num_left -= 1
        position = self._position
        was_in_string = position.in_string
        if self._is_json:
            position.read(text)
            self._least_depth = min(self._least_depth, position.depth or 1)
        if self._num_left > self._next_look and self._num_left - self._grown() > self._next_look:
            self._way = None
            return
        along = self._along(token_id, text, in_string=was_in_string)
        if along is not None and len(along) <= self._num_left:
            self._way = along
            return
        way = self._way
        # A quotation mark after a backslash closes nothing.
        goes_on = was_in_string and position.in_string and not position.in_escape
        if goes_on and self._only_closes(way, matcher):
            return
        if matcher.is_stopped():
            self._way = None
            return
        fits = way is not None and len(way) <= self._num_left and _is_way(matcher, way)
        if not fits and not self._rejoin(matcher):
            self._look(matcher, in_reasoning=in_reasoning)
        self._plan_next_look()

    def _only_closes(self, way: list[int] | None, matcher: LLMatcher) -> bool:
        """Whether a way begins with the end of a string that goes on, and may still. What follows
        on a string does not depend on its text, but where that decides between alternatives."""
        if not way or len(way) > self._num_left or self._tokens.of[way[0]][:1] != b'"':
            return False
        return _is_way(matcher, way[:_AFTER_STRING])

    def _along(self, token_id: int, text: bytes, *, in_string: bool) -> list[int] | None:
        """What is left of the way after a token whose text it begins with; None if it does not. A
        grammar does not ask in which tokens a text comes, and JSON not for white space."""
        way, of = self._way or [], self._tokens.of
        if way and way[0] == token_id:
            return way[1:]
        if text != of[token_id]:  # reasoning has ended within the token, or before it
            return None
        rest = self._after(text)
        if rest is not None or not self._is_json:
            return rest
        bare = _without_space(text, in_string=in_string)
        rest = None if bare == text else self._after(bare)
        # A number does not go on after white space.
        return rest if rest and of[rest[0]][:1] in _STRUCTURE else None

    def _after(self, text: bytes) -> list[int] | None:
        """What is left of the way after a text that it begins with; None if it does not."""
        way, of = self._way or [], self._tokens.of
        if not text:
            return way or None
        for index, part in enumerate(of[each] for each in way):
            if not part:
                return None
            if len(part) > len(text):
                rest = self._tokens.by_bytes.get(part[len(text) :])
                if rest is None or not part.startswith(text):
                    return None
                return [rest[0], *way[index + 1 :]]
            if not text.startswith(part):
                return None
            text = text[len(part) :]
            if not text:
                return way[index + 1 :]
        return None

    def _rejoin(self, matcher: LLMatcher) -> bool:
        """Skips some tokens of the way if the output fits what then follows; returns whether it
        does. Much cheaper than another search, which mostly finds the same."""
        way = self._way or []
        for skipped in range(1, min(_MOST_SKIPPED + 1, len(way))):
            rest = way[skipped:]
            if len(rest) <= self._num_left and _is_way(matcher, rest):
                self._way = self._way_before = rest
                return True
        return False

    def _look(self, matcher: LLMatcher, *, in_reasoning: bool) -> None:
        """Looks for a way to the end."""
        given = min(_TRIES_OF_A_TOKEN, self._tries_left)
        tries = Tries(given)
        self._way = self._endings.shortest(
            matcher,
            self._position,
            self._num_left,
            in_reasoning=in_reasoning,
            tries=tries,
            known=self._way_before,
        )
        self._way_before = self._way or self._way_before
        self._tries_left -= given - tries.left

    def restrict(self, bits: Bits, matcher: LLMatcher, *, in_reasoning: bool) -> None:
        """Takes out of a mask what would be too long.

        Args:
            bits: uint32 [ceil(vocab_size / 32)], what the matcher allows next.
            matcher: the sequence's; it is not moved.
            in_reasoning: the sequence ends within reasoning.
        """
        if not self._way:
            return
        spare = self._spare()
        if spare is None or spare > self._watched:
            return
        tries = Tries(_TRIES_OF_A_MASK)
        word, bit = self._way[0] // 32, np.uint32(1 << self._way[0] % 32)
        if not bits[word] & bit:  # items would be the same
            return
        if in_reasoning:
            # What is to be said needs more room than the shortest answer.
            if spare > self._lean:
                return
            bits[:] = 0
        elif spare <= self._hard and not (spare > _STRING_MARGIN and self._is_free_text(matcher)):
            bits[:] = 0
        elif spare <= self._hard:
            bits &= ~(self._tokens.quotes | self._tokens.unfinished)
        elif (ways := _few(bits)) is not None:
            self._forbid_late_ends(ways, bits, matcher, tries, are_near=spare <= self._near)
        elif self._is_json and spare <= self._lean:
            self._forbid_growth(bits, matcher, tries, may_add_items=spare > self._soft)
        bits[word] |= bit

    def _forbid_late_ends(
        self, ways: list[int], bits: Bits, matcher: LLMatcher, tries: Tries, *, are_near: bool
    ) -> None:
        """Leaves those of a few tokens after which there is a way to an end in time."""
        of = self._tokens.of
        if not are_near and self._is_json and not self._position.in_string:
            ways = [n for n in ways if _MAY_BEGIN_MUCH.search(of[n])]
        if not ways:
            return
        # Texts after which there is one, and the tokens to spare then: who begins like one of them
        # can go on to it, by a token for each byte at worst.
        known: list[tuple[bytes, int]] = []
        for token_id in sorted(ways, key=lambda n: -len(of[n])):
            text = of[token_id]
            if text and any(
                longer.startswith(text) and len(longer) - len(text) <= spare
                for longer, spare in known
            ):
                continue
            spare_then = self._spare_after(token_id, matcher, tries)
            if tries.left <= 0:
                return  # of what was not looked at to the end nothing is known
            if spare_then is None:
                bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            else:
                known.append((text, spare_then))

    def _forbid_growth(
        self, bits: Bits, matcher: LLMatcher, tries: Tries, *, may_add_items: bool
    ) -> None:
        """Leaves what adds nothing that has to be ended in its turn."""
        position, tokens = self._position, self._tokens
        if position.awaits_name:
            bits[:] = 0
        elif position.in_string:
            bits &= ~(tokens.many_moves if may_add_items else tokens.quotes)
        elif not may_add_items:
            bits &= ~tokens.openers
        else:
            bits &= ~tokens.many_moves
            for char in (b"{", b"[", b","):
                known = tokens.by_bytes.get(char)
                goes = char != b"," or not position.in_object
                spare = None
                if goes and known is not None and bits[known[0] // 32] >> known[0] % 32 & 1:
                    spare = self._spare_after(known[0], matcher, tries)
                if spare is None or spare < self._hard:
                    bits &= ~tokens.having(char)

    def _spare_after(self, token_id: int, matcher: LLMatcher, tries: Tries) -> int | None:
        """Tokens that are left beyond a way to the end after a token; None where none is known that
        fits."""
        left = self._num_left - 1
        way = self._way or []
        text, in_string = self._tokens.of[token_id], self._position.in_string
        along = self._along(token_id, text, in_string=in_string)
        if along is not None and len(along) <= left:
            return left - len(along)
        for rest in (way[skipped:] for skipped in range(min(_MOST_SKIPPED, len(way)))):
            if len(rest) <= left and _is_way(matcher, [token_id, *rest]):
                return left - len(rest)
        follower = matcher.deep_copy()
        if not follower.consume_token(token_id):
            return None
        if follower.is_stopped():
            return left
        position = self._position.copy()
        position.read(self._tokens.of[token_id])
        found = self._endings.shortest(follower, position, left, tries=tries, known=way)
        return None if found is None else left - len(found)

    def _is_free_text(self, matcher: LLMatcher) -> bool:
        """Whether a string goes on that has room for any text, as far as some samples tell."""
        position = self._position
        if self._way is None or not position.in_string or position.awaits_name:
            return False
        samples = (self._tokens.by_bytes.get(text, [-1])[0] for text in (b"a", b" the", b"Q", b"7"))
        after = self._way[:_AFTER_STRING]
        return all(_is_way(matcher, [n, *after]) for n in samples if n >= 0)

    def _spare(self) -> int | None:
        """Tokens that are left beyond the way; None where no way is known that fits."""
        if self._way is None or len(self._way) > self._num_left:
            return None
        return self._num_left - len(self._way)

    def _plan_next_look(self) -> None:
        """Until so many tokens are left the output goes on unwatched."""
        spare = self._spare()
        self._least_depth = self._position.depth
        if spare is None:
            self._next_look = self._num_left - _PAUSE
        elif spare <= self._watched + _WORTHWHILE:
            self._next_look = self._num_left
        elif self._growth is None:
            self._next_look = self._num_left - spare // 4
        else:
            self._next_look = self._num_left - (spare - self._watched)

    def _grown(self) -> int:
        """By how many tokens the way may be longer than it was: by what has been opened since then
        and is open still. One as deep may have been closed before."""
        return (self._position.depth - self._least_depth) * (self._growth or 0)


def _few(bits: Bits) -> list[int] | None:
    """The tokens of a mask, where they are few."""
    if np.count_nonzero(bits) > _MOST_WAYS:
        return None
    # For a few in half the time of `numbers_of`, which unpacks all bits.
    numbers: list[int] = []
    (words,) = bits.nonzero()
    for word, left in zip(words.tolist(), bits[words].tolist(), strict=True):
        while left and len(numbers) <= _MOST_WAYS:
            lowest = left & -left
            numbers.append(word * 32 + lowest.bit_length() - 1)
            left ^= lowest
    return numbers if len(numbers) <= _MOST_WAYS else None


def _without_space(text: bytes, *, in_string: bool) -> bytes:
    """A JSON text without the white space between its parts; as it is where it has some of a
    string's text too.

    Args:
        text: part of a JSON text.
        in_string: it begins within a string.
    """
    bare = text.translate(None, b" \t\r\n")
    if bare == text:
        return text
    within = text.split(b'"')[0 if in_string else 1 :: 2]
    return text if any(within) else bare


def _is_way(matcher: LLMatcher, token_ids: list[int]) -> bool:
    return matcher.validate_tokens(token_ids) == len(token_ids)
