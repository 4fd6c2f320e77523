"""Reads JSON byte by byte: the arrays whose items have to differ, and what items they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from pagewire_engine.json_schemas.disjoint import value_key
from pagewire_engine.json_schemas.places import Place

_SPACE = frozenset(b" \t\r\n")
# Strings, of which the last may not have ended, and what is no white space between them.
_PIECES = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[^ \t\r\n"]+', re.DOTALL)
_QUOTE, _BACKSLASH, _COMMA, _COLON, _BRACKET = b'"\\,:['
_OPENERS, _CLOSERS = frozenset(b"{["), frozenset(b"}]")


class Frame(NamedTuple):
    """An array or object that is open.

    Attributes:
        outer: what it is in.
        is_array: and not an object.
        place: where it stands.
        start: the byte at which it begins.
        keys: of the items that it has, where they have to differ, for equality.
        texts: and those items' texts.
        name: of the member that comes.
    """

    outer: Frame | None
    is_array: bool
    place: Place
    start: int
    keys: frozenset[str] | None = None
    texts: tuple[bytes, ...] = ()
    name: str = ""


class Reading(NamedTuple):
    """How far a text has been read.

    Attributes:
        frame: the innermost array or object.
        root: the place of the whole value.
        start: where the string or plain value begins that is being read.
        in_string, in_plain: it is in one; `escaped`: after a backslash.
        awaits_name: the next string is a member's name.
    """

    frame: Frame | None
    root: Place
    start: int = 0
    in_string: bool = False
    in_plain: bool = False
    escaped: bool = False
    awaits_name: bool = False


class ItemReader:
    """Reads one sequence's text.

    Args:
        root: the place of the whole value.

    Attributes:
        reading: how far the text has been read.
    """

    __slots__ = ("_text", "reading")

    def __init__(self, root: Place) -> None:
        self._text = bytearray()
        self.reading = Reading(None, root)

    def copy(self) -> ItemReader:
        """One like this, for another sequence."""
        other = ItemReader(self.reading.root)
        other.reading, other._text = self.reading, self._text.copy()
        return other

    def read(self, text: bytes) -> None:
        """The text has gone on with these bytes."""
        reading = self.after(self.reading, b"", text)
        self._text += text
        if reading is not None:
            self.reading = reading

    def since(self, start: int, ahead: bytes) -> bytes:
        """The text from a byte on, if it went on with `ahead`."""
        return bytes(self._text[start:]) + ahead[max(0, start - len(self._text)) :]

    def item_so_far(self, reading: Reading, frame: Frame, ahead: bytes) -> bytes:
        """The item that is being read in an open array, at whatever depth, as `plain` has it."""
        inner = reading.frame
        start = reading.start
        while inner is not None and inner is not frame:
            start = inner.start
            inner = inner.outer
        return plain(self.since(start, ahead))

    def after(self, reading: Reading, ahead: bytes, token: bytes) -> Reading | None:
        """How far is read after a token; None where two items are the same then.

        Args:
            reading: before it.
            ahead: what lies between the text and the token.
            token: its bytes.
        """
        text = ahead + token
        place = len(self._text) + len(ahead)
        frame, root, start, in_string, in_plain, escaped, awaits_name = reading
        for char in token:
            if in_string:
                if escaped:
                    escaped = False
                elif char == _BACKSLASH:
                    escaped = True
                elif char == _QUOTE:
                    in_string = False
                    if awaits_name and frame is not None:
                        name = self.since(start, text)[: place + 1 - start]
                        frame = frame._replace(name=_name(name))
                    elif (frame := self._ended(frame, start, place + 1, text)) is _SAME:
                        return None
                place += 1
                continue
            if in_plain and (char in _SPACE or char == _COMMA or char in _CLOSERS):
                in_plain = False
                if (frame := self._ended(frame, start, place, text)) is _SAME:
                    return None
            if char == _QUOTE:
                in_string, start = True, place
            elif char in _OPENERS:
                frame = _opened(frame, root, place, is_array=char == _BRACKET)
                awaits_name = not frame.is_array
                start = place + 1
            elif char in _CLOSERS:
                if frame is not None:
                    start, outer = frame.start, frame.outer
                    if (frame := self._ended(outer, start, place + 1, text)) is _SAME:
                        return None
                awaits_name = False
            elif char == _COMMA:
                awaits_name = frame is not None and not frame.is_array
                start = place + 1
            elif char == _COLON:
                awaits_name = False
                start = place + 1
            elif char not in _SPACE and not in_plain:
                in_plain, start = True, place
            place += 1
        return Reading(frame, root, start, in_string, in_plain, escaped, awaits_name)

    def _ended(self, frame: Frame | None, start: int, end: int, ahead: bytes) -> Frame | None:
        """The frame in which a value has ended."""
        if frame is None or frame.keys is None:
            return frame
        text = self.since(start, ahead)[: end - start]
        if (key := key_of(text)) is None:
            return frame
        if key in frame.keys:
            return _SAME
        return frame._replace(keys=frame.keys | {key}, texts=(*frame.texts, plain(text)))


def _opened(outer: Frame | None, root: Place, start: int, *, is_array: bool) -> Frame:
    place = root
    if outer is not None:
        place = outer.place.item() if outer.is_array else outer.place.member(outer.name)
    keys = frozenset[str]() if is_array and place.is_unique else None
    return Frame(outer, is_array, place, start, keys)


def frames(frame: Frame | None) -> Iterator[Frame]:
    """An array or object that is open, and those that it is in."""
    while frame is not None:
        yield frame
        frame = frame.outer


def _name(text: bytes) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def key_of(text: bytes) -> str | None:
    """What tells a value from others; None where the text is no value yet."""
    try:
        return value_key(json.loads(text))
    except ValueError:
        return None


def plain(text: bytes) -> bytes:
    """JSON, whole or not, without the white space between its tokens."""
    return b"".join(_PIECES.findall(text))


_SAME = Frame(None, False, Place((), None), -1)  # type: ignore[arg-type]  # a mark
