"""How long the texts are that a regular expression matches from end to end.

Reads what JSON schemas' patterns are made of: characters, escapes, classes, groups, alternatives
and repetitions. Of anything else (back references, flags, conditions) nothing is said.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_REPEATED = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPED = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|[pP]\{[^}]*\}|[dDwWsSnrtfv]|[^A-Za-z0-9])",
    re.DOTALL,
)
_PLACES = ("\\b", "\\B", "\\A", "\\Z")
# Of what follows `(?`; a name ends with its bracket.
_GROUP = re.compile(r":|P?<[A-Za-z_]\w*>")
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_MOST_DEPTH = 100
_MOST_SIZE = 1 << 20


class Sizes(NamedTuple):
    """Characters of a text.

    Attributes:
        least: at least so many.
        most: at most; None where there is no bound, or one above a million.
        rest: the shortest end of one is at most as far away, wherever in a text one is.
    """

    least: int
    most: int | None
    rest: int


_NOTHING, _ONE = Sizes(0, 0, 0), Sizes(1, 1, 1)


class _Times(NamedTuple):
    """How often something is repeated."""

    least: int
    most: int | None


class _UnknownError(Exception):
    """The pattern has what is not read here."""


def pattern_sizes(pattern: str) -> Sizes | None:
    """The sizes of the texts that a pattern matches as a whole; None where it is not known."""
    reader = _Reader(pattern)
    try:
        sizes = reader.alternatives(0)
    except _UnknownError:
        return None
    return sizes if reader.place == len(pattern) else None


class _Reader:
    """Reads a pattern from its beginning on."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.place = 0

    def alternatives(self, depth: int) -> Sizes:
        """Up to the group's end, or the pattern's."""
        if depth > _MOST_DEPTH:
            raise _UnknownError
        found = self._sequence(depth)
        while self._passes("|"):
            other = self._sequence(depth)
            found = Sizes(
                min(found.least, other.least),
                _largest(found.most, other.most),
                max(found.rest, other.rest),
            )
        return found

    def _sequence(self, depth: int) -> Sizes:
        total = _NOTHING
        while self.place < len(self._pattern) and self._pattern[self.place] not in "|)":
            total = _sum(total, self._repeated(self._atom(depth)))
        return total

    def _atom(self, depth: int) -> Sizes:
        rest_starts = self._pattern.startswith
        if rest_starts(_PLACES, self.place):
            self.place += 2
            return _NOTHING
        if self._passes("^") or self._passes("$"):
            return _NOTHING
        if rest_starts("(", self.place):
            return self._group(depth)
        for single, begins in ((_CLASS, "["), (_ESCAPED, "\\")):
            if rest_starts(begins, self.place):
                found = single.match(self._pattern, self.place)
                if found is None:
                    raise _UnknownError
                self.place = found.end()
                return _ONE
        if rest_starts(("*", "+", "?"), self.place):
            raise _UnknownError  # there is nothing to repeat
        self.place += 1
        return _ONE

    def _group(self, depth: int) -> Sizes:
        is_look_around = self._pattern.startswith(_LOOK_AROUND, self.place)
        if is_look_around:
            self.place += 4 if self._pattern.startswith("(?<", self.place) else 3
        elif self._pattern.startswith("(?", self.place):
            kind = _GROUP.match(self._pattern, self.place + 2)
            if kind is None:
                raise _UnknownError
            self.place = kind.end()
        else:
            self.place += 1
        inner = self.alternatives(depth + 1)
        if not self._passes(")"):
            raise _UnknownError
        return _NOTHING if is_look_around else inner

    def _repeated(self, one: Sizes) -> Sizes:
        times = self._times()
        if times is None:
            return one
        if not self._passes("?"):  # lazy, which changes no size
            self._passes("+")
        if self._times() is not None:
            raise _UnknownError  # twice
        return _product(one, times)

    def _times(self) -> _Times | None:
        """The repetition that comes; None where none does."""
        for sign, times in (("*", _Times(0, None)), ("+", _Times(1, None)), ("?", _Times(0, 1))):
            if self._passes(sign):
                return times
        found = _REPEATED.match(self._pattern, self.place)
        if found is None or found[0] == "{}":
            return None  # a bracket that stands for itself
        if not found[1]:
            raise _UnknownError  # from none on, or the text `{,3}`: languages differ
        self.place = found.end()
        least = int(found[1] or 0)
        if not found[2]:
            return _Times(least, least)
        most = int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise _UnknownError
        return _Times(least, most)

    def _passes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.place):
            return False
        self.place += len(text)
        return True


def _largest(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _sum(one: Sizes, other: Sizes) -> Sizes:
    least = min(one.least + other.least, _MOST_SIZE)
    rest = min(max(one.rest + other.least, other.rest), _MOST_SIZE)
    if one.most is None or other.most is None or one.most + other.most > _MOST_SIZE:
        return Sizes(least, None, rest)
    return Sizes(least, one.most + other.most, rest)


def _product(one: Sizes, times: _Times) -> Sizes:
    if one.most == 0 or times.most == 0:
        return _NOTHING
    least = min(one.least * times.least, _MOST_SIZE)
    rest = min(one.rest + max(times.least - 1, 0) * one.least, _MOST_SIZE)
    if one.most is None or times.most is None or one.most * times.most > _MOST_SIZE:
        return Sizes(least, None, rest)
    return Sizes(least, one.most * times.most, rest)
