"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string, and holds back only what may yet become one.

    Of several the one that is complete first wins; of those complete at the same character, the
    longest. So the result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str, *, suspended: bool = False) -> tuple[str, str | None]:
        """Text that is settled now, and the stop string that ended it, if one did.

        Args:
            suspended: a stop string that is complete within this piece does not count; one that is
                only begun in it may.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        if not suspended and (match := self._first_match(text)):
            start, stop = match
            self._held = ""
            return text[: start + len(stop) if self._include else start], stop
        held = self._may_become_stop(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """What was held back: the text has ended, and no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))

    def _may_become_stop(self, text: str) -> int:
        """Length of the longest end of the text that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            # Found in the text, and not looked up among all prefixes: those of one long stop
            # string would fill the memory.
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < len(text) - longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
