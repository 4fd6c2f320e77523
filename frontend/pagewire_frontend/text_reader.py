"""Text that comes in pieces, read as if it were whole.

A parser is a generator over a reader: it yields where it needs text that has not come. What it
decides depends on the text alone, never on where a piece ends: every function here waits until the
text in hand, or the end, settles the matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")
# A generator that yields for more text.
Steps = Generator[None, None, ResultT]
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Markers:
    """Texts that mean something, none of which is within another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or after `start`."""
        return self._pattern.search(text, start)

    def begun_at(self, text: str, start: int) -> int:
        """Where the longest end of the text lies that is a proper prefix of a marker; the text's
        length if there is none."""
        earliest = len(text)
        for marker in self.texts:
            at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
            while 0 <= at < earliest:
                if marker.startswith(text[at:]):
                    earliest = at
                    break
                at = text.find(marker[0], at + 1)
        return earliest


class TextReader:
    """The text so far and the place in it.

    Attributes:
        ended: no more text will come.
    """

    __slots__ = ("_at", "_mark", "_text", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self.ended = False

    def add(self, text: str) -> None:
        """More text."""
        drop = self._at if self._mark is None else self._mark
        self._text = self._text[drop:] + text
        self._at -= drop
        if self._mark is not None:
            self._mark = 0

    def mark(self) -> None:
        """Remembers this place."""
        self._mark = self._at

    def forget(self) -> None:
        """Nobody will go back to the mark."""
        self._mark = None

    @property
    def since_mark(self) -> int:
        """Characters from the mark to here."""
        assert self._mark is not None, "there is no mark"
        return self._at - self._mark

    def rewind(self, count: int) -> str:
        """Goes back to `count` characters after the mark; returns those. The mark is forgotten."""
        assert self._mark is not None, "there is no mark"
        self._at = self._mark + count
        text = self._text[self._mark : self._at]
        self._mark = None
        return text

    def rest(self) -> str:
        """All text that is there."""
        text = self._text[self._at :]
        self._at = len(self._text)
        return text

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int) -> Steps[str]:
        """The next characters; fewer at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def back(self) -> None:
        """Goes back over the one character that was taken last."""
        self._at -= 1

    def run(self, pattern: re.Pattern[str]) -> str:
        """What the pattern matches of the text that is there; a character at a time it must mean
        the same."""
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def all_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Everything up to a character that the pattern does not match."""
        pieces: list[str] = []
        while True:
            pieces.append(self.run(pattern))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def skip_space(self) -> Steps[None]:
        """Goes on to what is no white space."""
        yield from self.all_of(_SPACE)

    def one_of(self, *texts: str) -> Steps[str]:
        """The text that comes next, taken; "" where it is none of these."""
        longest = max(map(len, texts))
        while True:
            ahead = self._text[self._at : self._at + longest]
            for text in texts:
                if ahead.startswith(text):
                    self._at += len(text)
                    return text
            if self.ended or not any(text.startswith(ahead) for text in texts):
                return ""
            yield

    def pass_end_of(self, *texts: str) -> Steps[None]:
        """Passes one of the texts, or the beginning of one that the end cuts off."""
        if not (yield from self.one_of(*texts)) and self.ended:
            ahead = self._text[self._at :]
            if any(text.startswith(ahead) for text in texts):
                self._at = len(self._text)

    def pass_until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Passes text on up to a marker, which is taken and returned; "" at the end."""
        while True:
            match = markers.find(self._text, self._at)
            if match is not None:
                emit(self._text[self._at : match.start()])
                self._at = match.end()
                return match[0]
            if self.ended:
                emit(self.rest())
                return ""
            begun = markers.begun_at(self._text, self._at)
            emit(self._text[self._at : begun])
            self._at = begun
            yield

    def read_until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """The text up to a marker, and the marker, which is taken; "" for it at the end."""
        pieces: list[str] = []
        marker = yield from self.pass_until(markers, pieces.append)
        return "".join(pieces), marker

    def pass_trimmed(self, markers: Markers, emit: Emit) -> Steps[str]:
        """`pass_until`, but the place is left at the white space before the marker, with the mark
        there, and that space is not passed on: only what the marker turns out to be tells whether
        it counts. At the end the mark stands before the last white space too."""
        while True:
            match = markers.find(self._text, self._at)
            if match is None and not self.ended:
                stop = markers.begun_at(self._text, self._at)
            else:
                stop = len(self._text) if match is None else match.start()
            text = self._text[self._at : stop].rstrip()
            emit(text)
            self._at += len(text)
            if match is not None:
                self.mark()
                self._at = match.end()
                return match[0]
            if self.ended:
                self.mark()
                self._at = len(self._text)
                return ""
            yield
