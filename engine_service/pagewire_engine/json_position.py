"""Where in a JSON text one is, as it is produced."""

from __future__ import annotations

_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
_OPENERS, _CLOSERS = frozenset(b"{["), frozenset(b"}]")
_BRACE = b"{"[0]


class JsonPosition:
    """Reads JSON byte by byte, and knows no more than these.

    Attributes:
        in_string: within a string.
        in_escape: within a string, right after the backslash that begins an escape.
        awaits_name: the string that comes, or is being read, is a member's name.
        depth: objects and arrays that are open.
    """

    __slots__ = ("_objects", "awaits_name", "depth", "in_escape", "in_string")

    def __init__(self) -> None:
        self.in_string = False
        self.awaits_name = False
        self.in_escape = False
        self.depth = 0
        self._objects: list[bool] = []

    def copy(self) -> JsonPosition:
        other = JsonPosition()
        other.in_string, other.awaits_name = self.in_string, self.awaits_name
        other.in_escape, other.depth = self.in_escape, self.depth
        other._objects = self._objects.copy()
        return other

    @property
    def in_object(self) -> bool:
        """The innermost that is open is an object."""
        return bool(self._objects) and self._objects[-1]

    def read(self, text: bytes) -> None:
        """The text has gone on with these bytes."""
        if self.in_string and not self.in_escape and b'"' not in text and b"\\" not in text:
            return
        for char in text:
            if self.in_string:
                if self.in_escape:
                    self.in_escape = False
                elif char == _BACKSLASH:
                    self.in_escape = True
                elif char == _QUOTE:
                    self.in_string = False
            elif char == _QUOTE:
                self.in_string = True
            elif char in _OPENERS:
                self._objects.append(char == _BRACE)
                self.awaits_name = char == _BRACE
            elif char in _CLOSERS:
                if self._objects:
                    self._objects.pop()
                self.awaits_name = False
            elif char == _COLON:
                self.awaits_name = False
            elif char == _COMMA:
                self.awaits_name = self.in_object
        self.depth = len(self._objects)
