"""Calls written as a list of Python's: `[get_weather(city="Paris"), now()]`."""

from __future__ import annotations

import re

from pagewire_frontend.answers import to_json
from pagewire_frontend.text_reader import Steps
from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.json_text import MalformedError
from pagewire_frontend.tool_parsers.values import python_value

_PLAIN = re.compile(r"""[^'"()\[\]{},\\]*""")
_WORD = re.compile(r"\w*")


class PythonicParser(ToolParser):
    """Llama 3.2 and 4, LFM 2: the list in place of an answer, or between control tokens.

    Each argument is passed on once it is whole.
    """

    openers = ("<|python_tag|>", "<|tool_call_start|>")
    closers = ("<|tool_call_end|>", "<|python_end|>")
    inner = ("<|python_start|>",)
    at_start = True

    def _call(self, opener: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        yield from self._take("[")
        while True:
            yield from reader.skip_space()
            name = yield from self._name()
            if name not in self._schemas:
                raise MalformedError
            yield from self._take("(")
            self._begin(name)
            yield from self._pass_arguments()
            self._whole()
            yield from reader.skip_space()
            separator = yield from reader.take(1)
            if separator == "]":
                return
            if separator != ",":
                raise MalformedError

    def _pass_arguments(self) -> Steps[None]:
        reader, out = self._reader, self._out
        separator = "{"
        while True:
            yield from reader.skip_space()
            if (yield from reader.peek()) == ")":
                break
            argument = yield from reader.all_of(_WORD)
            yield from reader.skip_space()
            yield from self._take("=")
            text = yield from self._literal()
            try:
                value = to_json(python_value(text))
            except (ValueError, RecursionError):
                raise MalformedError from None
            out.arguments(f"{separator}{to_json(argument)}: {value}")
            separator = ", "
            if (yield from reader.peek()) == ",":
                yield from reader.take(1)
        yield from reader.take(1)
        out.arguments("{}" if separator == "{" else "}")

    def _literal(self) -> Steps[str]:
        """A literal's text, up to the comma or bracket that ends it."""
        reader = self._reader
        pieces: list[str] = []
        depth = 0
        while True:
            pieces.append(reader.run(_PLAIN))
            char = yield from reader.peek()
            if not char:
                raise MalformedError
            if char in "'\"":
                pieces.append((yield from self._string()))
                continue
            if depth == 0 and char in ",)]}":
                return "".join(pieces)
            if char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            pieces.append((yield from reader.take(1)))

    def _string(self) -> Steps[str]:
        reader = self._reader
        quote = yield from reader.take(1)
        pieces = [quote]
        while True:
            pieces.append(reader.run(_PLAIN))
            char = yield from reader.take(1)
            pieces.append(char)
            if char == "\\":
                pieces.append((yield from reader.take(1)))
            elif char == quote:
                return "".join(pieces)
            elif not char:
                raise MalformedError
