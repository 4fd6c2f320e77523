"""Calls whose arguments stand between tags, without quotes. Their types are those of the tool's
schema: a string is passed on as it comes, anything else once it is whole."""

from __future__ import annotations

import json
from typing import ClassVar

from pagewire_frontend.answers import to_json
from pagewire_frontend.text_reader import Emit, Markers, Steps
from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.json_text import MalformedError
from pagewire_frontend.tool_parsers.values import argument_json, types_of

_STRING = frozenset(("string",))


class XmlCallParser(ToolParser):
    """What the formats share: an argument's value up to its tag."""

    def _pass_argument(self, tool: str, argument: str, end: str) -> Steps[None]:
        """Passes `"argument": value` on.

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
            tag = yield from self._reader.pass_until(Markers(end), value.add)
            if tag:
                out.arguments('"')
        else:
            text, tag = yield from self._reader.read_until(Markers(end))
            if tag:
                out.arguments(argument_json(text, types))
        if not tag:
            raise MalformedError


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
    """Qwen 3 Coder and Nemotron 3: a tag for the function and one for each argument."""

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
        separator = ""
        while True:
            yield from reader.skip_space()
            tag = yield from reader.one_of("<parameter=", *self.closers)
            if tag in self.closers:
                break
            if not tag:
                raise MalformedError
            argument, end = yield from reader.read_until(Markers(">"))
            if not end:
                raise MalformedError
            out.arguments(separator)
            yield from self._pass_argument(name, argument, "</parameter>")
            separator = ", "
        out.arguments("}")
        self._whole()


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
            yield from self._pass_argument(name, argument.strip(), "</arg_value>")
            separator = ", "
            yield from reader.skip_space()
            tag = yield from reader.one_of("<arg_key>", "</tool_call>")
        if not tag:
            raise MalformedError
        out.arguments("}")
        self._whole()
