"""Calls of an answer that had to be calls: JSON and nothing else, whatever the model's own format.

`tool_choice.constraint_for` has the schemas.
"""

from __future__ import annotations

from pagewire_frontend.text_reader import Steps
from pagewire_frontend.tool_parsers.json_calls import JsonCallParser


class RequiredCallsParser(JsonCallParser):
    """A list of `{"name": ..., "parameters": {...}}`."""

    at_start = True

    def _call(self, opener: str) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._objects()


class NamedCallParser(JsonCallParser):
    """The arguments of the one call that there has to be."""

    at_start = True

    def _call(self, opener: str) -> Steps[None]:
        (name,) = self._schemas
        yield from self._reader.skip_space()
        yield from self._pass_arguments(name)
