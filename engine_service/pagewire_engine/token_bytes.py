"""The vocabulary's tokens as bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Bits = npt.NDArray[np.uint32]
_QUOTE, _BACKSLASH = b'"\\'
_CLOSERS, _OPENERS = frozenset(b"}]"), frozenset(b"{[,:")


class TokenBytes:
    """The tokens of a vocabulary, and sets of them as bits of a mask.

    Args:
        vocabulary: the model's.

    Attributes:
        of: each token's bytes; none for control tokens.
        by_bytes: the tokens that are these bytes.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self.of = [
            b"" if vocabulary.is_special_token(n) else vocabulary.decode_bytes([n])
            for n in range(vocabulary.vocab_size)
        ]
        self.by_bytes: dict[bytes, list[int]] = {}
        for number, text in enumerate(self.of):
            self.by_bytes.setdefault(text, []).append(number)
        self._having: dict[bytes, Bits] = {}

    @cached_property
    def quotes(self) -> Bits:
        """Tokens with a quotation mark."""
        return self._bits_of(lambda text: _QUOTE in text)

    @cached_property
    def closers(self) -> Bits:
        """Tokens with the end of an array or object."""
        return self._bits_of(lambda text: not _CLOSERS.isdisjoint(text))

    @cached_property
    def several(self) -> Bits:
        """What may end two items, or begin an array and end two of its items."""
        return self._bits_of(lambda text: b"," in text[1:-1] or text.count(b",") > 1)

    @cached_property
    def several_items(self) -> Bits:
        """The same from within a string."""
        return self.several & self.quotes

    @cached_property
    def letters(self) -> list[int]:
        """Tokens of a letter or digit each, rare ones first."""
        known = (self.by_bytes.get(char.encode()) for char in "qxjzkvQXJZKV70")
        return [ids[0] for ids in known if ids]

    @cached_property
    def spaces(self) -> Bits:
        """Tokens of white space alone."""
        return self._bits_of(bytes.isspace)

    @cached_property
    def escaped_ends(self) -> Bits:
        """Tokens with an escape that may end a string."""
        return self._bits_of(lambda text: _QUOTE in text and _BACKSLASH in text)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((text, number) for number, text in enumerate(self.of))

    def beginning_with(self, text: bytes) -> list[int]:
        """The tokens that begin with these bytes."""
        found: list[int] = []
        for index in range(bisect_left(self._sorted, (text, -1)), len(self._sorted)):
            token, number = self._sorted[index]
            if not token.startswith(text):
                break
            found.append(number)
        return found

    def having(self, char: bytes) -> Bits:
        """Tokens with a character."""
        known = self._having.get(char)
        if known is None:
            known = self._having[char] = self._bits_of(lambda text: char in text)
        return known

    @cached_property
    def openers(self) -> Bits:
        """Tokens after which more has to come, outside of strings."""
        return self._bits_of(lambda text: not _OPENERS.isdisjoint(text))

    @cached_property
    def many_moves(self) -> Bits:
        """Tokens that do more than one thing outside of strings: that go on after a quotation mark
        at which a string may have ended, or after what asks for more."""
        return self._bits_of(
            lambda text: _QUOTE in text[:-1] or sum(char in _OPENERS for char in text) > 1
        )

    @cached_property
    def string_beginnings(self) -> Bits:
        """Tokens that begin a string with some of its text, and do not end it."""
        return self._bits_of(
            lambda text: len(text) > 1 and text[0] == _QUOTE and text.count(b'"') == 1
        )

    @cached_property
    def unfinished(self) -> Bits:
        """Tokens after which a string can't end: with a backslash, or part of a character."""
        return self._bits_of(lambda text: _BACKSLASH in text or not _is_utf8(text))

    def _bits_of(self, belongs: Callable[[bytes], bool]) -> Bits:
        flags = np.zeros(-(-len(self.of) // 32) * 32, np.bool_)
        flags[: len(self.of)] = [belongs(text) for text in self.of]
        return np.packbits(flags, bitorder="little").view(np.uint32)

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each token."""
        return np.array([len(text) for text in self.of], np.int64)

    def shortest_of(self, bits: Bits) -> int | None:
        """The shortest token of a mask, and of those the first; control tokens are none."""
        numbers = np.array(numbers_of(bits), np.int64)
        numbers = numbers[numbers < len(self.of)]
        numbers = numbers[self._lengths[numbers] > 0]
        if not len(numbers):
            return None
        return int(numbers[np.argmin(self._lengths[numbers])])

    def prepare(self) -> None:
        """Makes every set that may be asked for, which takes some 10 ms each: whoever compiles a
        grammar can wait for them, a step can't."""
        for name in ("{", "[", ","):
            self.having(name.encode())
        for name in (
            "quotes",
            "closers",
            "several",
            "several_items",
            "escaped_ends",
            "_sorted",
            "letters",
            "spaces",
            "openers",
            "many_moves",
            "string_beginnings",
            "unfinished",
            "_lengths",
        ):
            getattr(self, name)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def numbers_of(bits: Bits) -> list[int]:
    """The numbers of the bits that are set."""
    words = np.flatnonzero(bits)
    if not len(words):
        return []
    some = np.unpackbits(bits[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    rows, places = np.nonzero(some)
    return [int(n) for n in words[rows] * 32 + places]
