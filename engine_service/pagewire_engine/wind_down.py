"""Brings a constrained output to its end before `max_tokens` cuts it.

`end_watch` knows a way to the end. The fewer tokens there are to spare, of those that are left,
beyond that way, the fewer are allowed:

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
from typing import TYPE_CHECKING

import numpy as np

from pagewire_engine.end_watch import AFTER_STRING, WATCHED, Ending, EndWatch, is_way
from pagewire_engine.grammar_endings import Tries
from pagewire_engine.token_bytes import Bits, TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Below it whatever could follow is tried, before that outside of strings what may begin something
# long, or decide by a constant what else there has to be: the rest of a number takes no more.
_NEAR = 32
_MAY_BEGIN_MUCH = re.compile(rb'["{\[,:]|^\s*[tfn]')
_MOST_SOFT, _SOFT_SHARE = 64, 8
_MOST_HARD, _HARD_SHARE = 16, 32
_LEAST_HARD = 3  # what a token may begin within a text: three more bytes of a character
_STRING_MARGIN = 3
_MOST_WAYS = 16
# Calls of llguidance, of some microseconds each, that may be made for one mask. They are not added
# up: a matcher that is made anew is given all the tokens, and asked for no mask of them.
_TRIES_OF_A_MASK = 2048


class WindDown:
    """Restricts one sequence.

    Args:
        ending: of its grammar.
        tokens: the vocabulary's.
        max_tokens: of the sequence's output.

    Attributes:
        watch: to be told of each token. While it has no way, nothing is taken out of masks.
    """

    __slots__ = ("_hard", "_is_json", "_lean", "_near", "_soft", "_tokens", "watch")

    def __init__(self, ending: Ending, tokens: TokenBytes, max_tokens: int) -> None:
        self._is_json = ending.endings.is_json
        self._tokens = tokens
        self._hard = min(_MOST_HARD, max(_LEAST_HARD, max_tokens // _HARD_SHARE))
        self._soft = min(_MOST_SOFT, max_tokens // _SOFT_SHARE)
        self.watch = EndWatch(ending, tokens, max_tokens, kept=self._hard)
        if ending.growth is None:
            self._near = _NEAR
            # An item may be about as long as the shortest output: begin none that does not fit.
            self._lean = min(WATCHED, self._soft + len(ending.first or ()))
        else:
            self._near = min(_NEAR, self.watch.enough)
            self._lean = min(self.watch.enough, self._soft + ending.growth)

    def only_token(self, matcher: LLMatcher, *, in_reasoning: bool) -> int | None:
        """The token that has to come where the way alone is left; None where others may.

        Args:
            matcher: the sequence's; it is not moved.
            in_reasoning: the sequence ends within reasoning.
        """
        way, spare = self.watch.way, self.watch.spare()
        if not way or spare is None:
            return None
        if in_reasoning:
            # What is to be said needs more room than the shortest answer.
            if spare > self._lean:
                return None
        elif spare > self._hard or (spare > _STRING_MARGIN and self._is_free_text(matcher)):
            return None
        first = way[:1]
        return first[0] if is_way(matcher, first) else None

    def restrict(self, bits: Bits, matcher: LLMatcher, *, in_reasoning: bool) -> None:
        """Takes out of a mask what would be too long.

        Args:
            bits: uint32 [ceil(vocab_size / 32)], what the matcher allows next.
            matcher: the sequence's; it is not moved.
            in_reasoning: the sequence ends within reasoning.
        """
        way, spare = self.watch.way, self.watch.spare()
        if not way or spare is None or spare > self.watch.enough:
            return
        word, bit = way[0] // 32, np.uint32(1 << way[0] % 32)
        if not bits[word] & bit:  # items would be the same
            self._forbid_space(bits)
            return
        if self.only_token(matcher, in_reasoning=in_reasoning) is not None:
            bits[:] = 0
        elif in_reasoning:
            return
        elif spare <= self._hard:
            bits &= ~(self._tokens.quotes | self._tokens.unfinished)
        elif (ways := _few(bits)) is not None:
            self._forbid_late_ends(ways, bits, matcher, are_near=spare <= self._near)
        elif self._is_json and spare <= self._lean:
            self._forbid_growth(bits, matcher, may_add_items=spare > self._soft)
        bits[word] |= bit

    def _forbid_space(self, bits: Bits) -> None:
        """Leaves of a mask what goes on, where there is such: white space could take what is left
        while the way does not hold."""
        if self._is_json and not self.watch.position.in_string:
            others = bits & ~self._tokens.spaces
            if others.any():
                bits[:] = others

    def _forbid_late_ends(
        self, ways: list[int], bits: Bits, matcher: LLMatcher, *, are_near: bool
    ) -> None:
        """Leaves those of a few tokens after which there is a way to an end in time."""
        of = self._tokens.of
        if not are_near and self._is_json and not self.watch.position.in_string:
            ways = [n for n in ways if _MAY_BEGIN_MUCH.search(of[n])]
        if not ways:
            return
        # Texts after which there is one, and the tokens to spare then: who begins like one of them
        # can go on to it, by a token for each byte at worst.
        known: list[tuple[bytes, int]] = []
        tries = Tries(_TRIES_OF_A_MASK)
        for token_id in sorted(ways, key=lambda n: -len(of[n])):
            text = of[token_id]
            if text and any(
                longer.startswith(text) and len(longer) - len(text) <= spare
                for longer, spare in known
            ):
                continue
            spare_then = self.watch.spare_after(token_id, matcher, tries)
            if tries.left <= 0:
                return  # of what was not looked at to the end nothing is known
            if spare_then is None:
                bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            else:
                known.append((text, spare_then))

    def _forbid_growth(self, bits: Bits, matcher: LLMatcher, *, may_add_items: bool) -> None:
        """Leaves what adds nothing that has to be ended in its turn."""
        tries = Tries(_TRIES_OF_A_MASK)
        position, tokens = self.watch.position, self._tokens
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
                    spare = self.watch.spare_after(known[0], matcher, tries)
                if spare is None or spare < self._hard:
                    bits &= ~tokens.having(char)

    def _is_free_text(self, matcher: LLMatcher) -> bool:
        """Whether a string goes on that has room for any text, as far as some samples tell."""
        position, way = self.watch.position, self.watch.way
        if way is None or not position.in_string or position.awaits_name:
            return False
        samples = (self._tokens.by_bytes.get(text, [-1])[0] for text in (b"a", b" the", b"Q", b"7"))
        after = way[:AFTER_STRING]
        return all(is_way(matcher, [n, *after]) for n in samples if n >= 0)


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
