"""Calls of an answer that had to be calls: JSON and nothing else, whatever the model's own format.

`tool_choice.constraint_for` has the schemas.
"""

from __future__ import annotations

from pagewire_frontend.text_reader import Markers, Steps
from pagewire_frontend.tool_parsers.json_calls import JsonCallParser


class ForcedCallParser(JsonCallParser):
    """What both share: the answer is nothing but calls."""

    def _parse(self) -> Steps[None]:
        self._reader.mark()
        yield from self._attempt("")
        yield from self._reader.pass_until(Markers(), self._leftover)

    def _leftover(self, text: str) -> None:
        """The beginning of a call that was cut off before it was one: the list's punctuation, which
        is no content beside calls. Where it is all there is, it shows what became of the answer."""
        if not self.num_calls:
            self._out.content(text)


class RequiredCallsParser(ForcedCallParser):
    """A list of `{"name": ..., "parameters": {...}}`."""

    def _call(self, opener: str) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._objects()


class NamedCallParser(ForcedCallParser):
    """The arguments of the one call that there has to be."""

    def _call(self, opener: str) -> Steps[None]:
        (name,) = self._schemas
        yield from self._reader.skip_space()
        yield from self._pass_arguments(name)
