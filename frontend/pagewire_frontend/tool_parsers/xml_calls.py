"""Calls whose arguments stand between tags, without quotes. Their types are those of the tool's
schema: a string is passed on as it comes, anything else once it is whole."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import ClassVar

from pagewire_frontend.answers import to_json
from pagewire_frontend.text_reader import Emit, Markers, Steps
from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.json_text import MalformedError
from pagewire_frontend.tool_parsers.values import argument_json, types_of

_STRING = frozenset(("string",))
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_ARGUMENT_NAME = re.compile(r"[^>\n]*")


class XmlCallParser(ToolParser):
    """What the formats share: an argument's value up to the tag that ends it."""

    @abstractmethod
    def _pass_value(self, emit: Emit) -> Steps[str]:
        """Passes a value on as it stands there. Returns the tag that ended it, "" at the end."""

    def _pass_argument(self, tool: str, argument: str) -> Steps[str]:
        """Passes `"argument": value` on. Returns the tag that ended it.

        Raises:
            MalformedError: the answer ends within it.
        """
        out = self._out
        schema = self._schemas.get(tool, {})
        properties = schema.get("properties")
        known = properties.get(argument) if isinstance(properties, dict) else None
        try:
            types = types_of(known, schema)
        except RecursionError:  # nested deeper than any type is
            types = frozenset()
        out.arguments(to_json(argument) + ": ")
        if types == _STRING:
            value = _StringValue(out.arguments)
            out.arguments('"')
            tag = yield from self._pass_value(value.add)
            if tag:
                out.arguments('"')
        else:
            pieces: list[str] = []
            tag = yield from self._pass_value(pieces.append)
            if tag:
                out.arguments(argument_json("".join(pieces), types))
        if not tag:
            raise MalformedError
        return tag


class _StringValue:
    """A text as part of a JSON string, less one line's end at each side, which is the format's."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._started = False
        self._held = ""

    def add(self, text: str) -> None:
        """More of it."""
        if not self._started and text:
            self._started = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if text:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])


class Qwen3CoderParser(XmlCallParser):
    """Qwen 3 Coder and Nemotron 3: a tag for the function and one for each argument.

    Models leave an argument's end out now and then. Then it ends where a line begins with what can
    only come after it: the next argument, or the end of the call with nothing but calls behind it.
    The same text elsewhere in a value is the value's.
    """

    outer: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    openers = ("<tool_call>", "<function=")
    closers = ("</tool_call>", "</function>")

    def _call(self, opener: str) -> Steps[None]:
        reader, out = self._reader, self._out
        if opener == self.outer[0]:
            yield from reader.skip_space()
            if not (yield from reader.one_of("<function=")):
                raise MalformedError
        name = yield from self._name()
        yield from self._take(">")
        self._begin(name)
        out.arguments("{")
        separator, tag = "", _PARAMETER_END
        while True:
            if tag == _PARAMETER_END:
                yield from reader.skip_space()
                tag = yield from reader.one_of(_PARAMETER, *self.closers)
            if tag in self.closers:
                break
            if not tag:
                raise MalformedError
            argument, end = yield from reader.read_until(Markers(">"))
            if not end:
                raise MalformedError
            out.arguments(separator)
            tag = yield from self._pass_argument(name, argument)
            separator = ", "
        out.arguments("}")
        self._whole()

    def _pass_value(self, emit: Emit) -> Steps[str]:
        nexts = (f"\n{_PARAMETER}", *(f"\n{closer}" for closer in self.closers))
        markers = Markers(_PARAMETER_END, *nexts)
        while True:
            tag = yield from self._reader.pass_until(markers, emit)
            if tag not in nexts:
                return tag
            if (yield from self._comes_after_a_value(tag[1:])):
                emit("\n")  # the line's end is the value's, as before its own tag
                return tag[1:]
            emit(tag)

    def _comes_after_a_value(self, tag: str) -> Steps[bool]:
        """Whether the tag that was taken is one, and no text of a value."""
        reader = self._reader
        reader.mark()
        if tag == _PARAMETER:
            yield from reader.all_of(_ARGUMENT_NAME)
            is_tag = (yield from reader.peek()) == ">"
        else:
            yield from reader.skip_space()
            others = (*self.openers, self.outer[1])
            is_tag = bool((yield from reader.one_of(*others))) or not (yield from reader.peek())
        reader.rewind(0)
        return is_tag


class SeedOssParser(Qwen3CoderParser):
    """Seed-OSS: the same within tags of its own."""

    outer = ("<seed:tool_call>", "</seed:tool_call>")
    openers = ("<seed:tool_call>", "<function=")
    closers = ("</seed:tool_call>", "</function>")


class Glm45Parser(XmlCallParser):
    """GLM 4.5 and 4.6: a name, then keys and values, each between tags."""

    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def _call(self, opener: str) -> Steps[None]:
        reader, out = self._reader, self._out
        yield from reader.skip_space()
        name = yield from self._name()
        yield from reader.skip_space()
        tag = yield from reader.one_of("<arg_key>", "</tool_call>")
        if not tag:
            raise MalformedError
        self._begin(name)
        out.arguments("{")
        separator = ""
        while tag == "<arg_key>":
            argument, end = yield from reader.read_until(Markers("</arg_key>"))
            yield from reader.skip_space()
            if not end or not (yield from reader.one_of("<arg_value>")):
                raise MalformedError
            out.arguments(separator)
            yield from self._pass_argument(name, argument.strip())
            separator = ", "
            yield from reader.skip_space()
            tag = yield from reader.one_of("<arg_key>", "</tool_call>")
        if not tag:
            raise MalformedError
        out.arguments("}")
        self._whole()

    def _pass_value(self, emit: Emit) -> Steps[str]:
        return (yield from self._reader.pass_until(Markers("</arg_value>"), emit))
