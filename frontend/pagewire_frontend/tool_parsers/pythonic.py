"""Calls written as a list of Python's: `[get_weather(city="Paris"), now()]`."""

from __future__ import annotations

import re

from pagewire_frontend.answers import to_json
from pagewire_frontend.text_reader import Emit, Steps
from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.json_text import MalformedError
from pagewire_frontend.tool_parsers.values import python_value

_PLAIN = re.compile(r"""[^'"()\[\]{},\\<]*""")
_WORD = re.compile(r"\w*")
_SPACE = re.compile(r"\s*")
_EQUALS = re.compile(r"=*")


class PythonicParser(ToolParser):
    """Llama 3.2 and 4, LFM 2: the list in place of an answer, or between control tokens.

    Each argument is passed on once it is whole: a literal as JSON has it, any other value, such as
    `2 * 3` or `len("ab")`, as a string that holds its source. From an argument without a name on,
    and in one that is cut off, there is no JSON to make: the arguments go on with what the model
    wrote, up to the call's parenthesis.
    """

    openers = ("<|python_tag|>", "<|python_start|>", "<|tool_call_start|>")
    closers = ("<|tool_call_end|>", "<|python_end|>")
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
        separator, comma = "{", ""
        while True:
            yield from reader.skip_space()
            if (yield from reader.peek()) == ")":
                out.arguments("{}" if separator == "{" else "}")
                break
            name = yield from reader.all_of(_WORD)
            written = name + (yield from reader.all_of(_SPACE))
            equals = yield from reader.all_of(_EQUALS)
            written += equals
            if not name or equals != "=":
                out.arguments(comma + written)
                yield from self._pass_source(out.arguments, ")")
                break
            pieces: list[str] = []
            try:
                yield from self._pass_source(pieces.append, ",)]}")
            except MalformedError:
                out.arguments(comma + written + "".join(pieces))
                raise
            out.arguments(f"{separator}{to_json(name)}: {_value_json(''.join(pieces))}")
            separator = ", "
            comma = separator if (yield from reader.one_of(",")) else ""
        yield from reader.take(1)

    def _pass_source(self, emit: Emit, ends: str) -> Steps[None]:
        """Passes source text on up to one of the characters `ends` outside of brackets and strings,
        which is not taken.

        Raises:
            MalformedError: the answer or the block of calls ends before.
        """
        reader = self._reader
        depth = 0
        while True:
            emit(reader.run(_PLAIN))
            char = yield from reader.peek()
            if depth == 0 and char and char in ends:
                return
            if not char or (char == "<" and (yield from self._at_closer())):
                raise MalformedError
            if char in "'\"":
                yield from self._pass_string(emit)
                continue
            if char in "([{":
                depth += 1
            elif char in ")]}":
                depth = max(0, depth - 1)
            emit((yield from reader.take(1)))

    def _at_closer(self) -> Steps[bool]:
        closer = yield from self._reader.one_of(*self.closers)
        for _ in closer:
            self._reader.back()
        return bool(closer)

    def _pass_string(self, emit: Emit) -> Steps[None]:
        reader = self._reader
        quote = yield from reader.take(1)
        tripled = yield from reader.one_of(quote * 2)
        emit(quote + tripled)
        while True:
            emit(reader.run(_PLAIN))
            char = yield from reader.take(1)
            emit(char)
            if char == "\\":
                emit((yield from reader.take(1)))
            elif char == quote:
                ending = (yield from reader.one_of(tripled)) if tripled else ""
                emit(ending)
                if ending == tripled:
                    return
            elif not char:
                raise MalformedError


def _value_json(source: str) -> str:
    try:
        return to_json(python_value(source))
    except (MalformedError, ValueError, RecursionError):
        return to_json(source.strip())
