"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import re

from pagewire_frontend.answers import mistral_call_id
from pagewire_frontend.text_reader import Steps
from pagewire_frontend.tool_parsers.base import NAME_CHARACTERS, ToolParser, check_name
from pagewire_frontend.tool_parsers.json_text import (
    MalformedError,
    pass_json,
    read_json,
    read_string,
)

_ARGUMENT_KEYS = ("arguments", "parameters")
# What else an object that is a call may have; another object is not read to its end in vain.
_OTHER_KEYS = frozenset(("type", "id"))
# Models of this family close one bracket too many.
_LEFTOVERS = re.compile(r"[\s}\]]*")


class JsonCallParser(ToolParser):
    """Reads such objects, alone or in a list."""

    # Without an opener any JSON might be a call: there only names of tools count.
    def _object(self, *, known_names_only: bool = False) -> Steps[None]:
        reader = self._reader
        yield from self._take("{")
        name: str | None = None
        arguments: str | None = None
        told = False
        while True:
            yield from reader.skip_space()
            key = yield from read_string(reader)
            yield from reader.skip_space()
            yield from self._take(":")
            yield from reader.skip_space()
            if key == "name" and name is None:
                name = check_name((yield from read_string(reader)))
                if known_names_only and name not in self._schemas:
                    raise MalformedError
            elif key in _ARGUMENT_KEYS and arguments is None:
                if name is None:
                    arguments = yield from self._read_arguments()
                else:
                    arguments, told = "", True
                    yield from self._pass_arguments(name)
            elif key in _OTHER_KEYS:
                yield from read_json(reader)
            else:
                raise MalformedError
            yield from reader.skip_space()
            separator = yield from reader.take(1)
            if separator == "}":
                break
            if separator != ",":
                raise MalformedError
        if name is None:
            raise MalformedError
        if not told:
            self._begin(name)
            self._out.arguments(arguments or "{}")
        self._whole()

    def _objects(self, *, known_names_only: bool = False) -> Steps[None]:
        """One object, or a list of them."""
        reader = self._reader
        if (yield from reader.peek()) != "[":
            yield from self._object(known_names_only=known_names_only)
            return
        yield from reader.take(1)
        while True:
            yield from reader.skip_space()
            yield from self._object(known_names_only=known_names_only)
            yield from reader.skip_space()
            separator = yield from reader.take(1)
            if separator == "]":
                return
            if separator != ",":
                raise MalformedError

    def _has_more_objects(self) -> Steps[bool]:
        """Whether objects follow those of a block, with or without a comma. What turns out to be no
        call is content from here on."""
        reader = self._reader
        reader.mark()
        yield from reader.skip_space()
        if (yield from reader.one_of(",")):
            yield from reader.skip_space()
        if (yield from reader.peek()) in ("{", "["):
            return True
        reader.rewind(0)
        return False

    def _pass_arguments(self, name: str) -> Steps[None]:
        if (yield from self._reader.peek()) == "{":
            self._begin(name)
            yield from pass_json(self._reader, self._out.arguments)
        else:
            arguments = yield from self._read_arguments()
            self._begin(name)
            self._out.arguments(arguments)
        self._whole()

    def _read_arguments(self) -> Steps[str]:
        """The arguments' JSON text, out of a string where the model put it into one."""
        text = yield from read_json(self._reader)
        if text == "null":
            return "{}"
        if not text.startswith('"'):
            return text
        inner = json.loads(text)
        if not inner.strip():
            return "{}"
        try:
            if isinstance(json.loads(inner), dict):
                inner.encode()
                return str(inner)
        except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
            pass
        return text


class HermesParser(JsonCallParser):
    """Hermes, Qwen 2.5 and 3: an object between tags. Some models put several into one block."""

    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def _call(self, opener: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        yield from self._objects()
        yield from reader.all_of(_LEFTOVERS)
        while (yield from self._has_more_objects()):
            yield from self._objects()
            yield from reader.all_of(_LEFTOVERS)
        yield from reader.pass_end_of(*self.closers)


class FunctionaryParser(JsonCallParser):
    """Functionary 3.1 and Llama 3.1's custom calls: the name in the tag, the arguments in it."""

    openers = ("<function=",)
    closers = ("</function>",)

    def _call(self, opener: str) -> Steps[None]:
        reader = self._reader
        name = yield from self._name()
        yield from self._take(">")
        yield from reader.skip_space()
        yield from self._pass_arguments(name)
        yield from reader.all_of(_LEFTOVERS)
        yield from reader.pass_end_of(*self.closers)


class Llama3JsonParser(JsonCallParser):
    """Llama 3: an object in place of an answer, or after a control token; several after `;`."""

    openers = ("<|python_tag|>",)
    at_start = True

    def _call(self, opener: str) -> Steps[None]:
        reader = self._reader
        while True:
            yield from reader.skip_space()
            yield from self._objects(known_names_only=True)
            yield from reader.skip_space()
            following = yield from reader.peek()
            if following == ";":
                yield from reader.take(1)
            elif following != "{":
                return


class FirefunctionParser(JsonCallParser):
    """Firefunction: a list of objects after a word."""

    openers = ("functools[",)

    def _call(self, opener: str) -> Steps[None]:
        self._reader.back()  # the list's bracket
        yield from self._objects()


class MistralParser(JsonCallParser):
    """Mistral: a list of objects, or since 2025 a name and its arguments, after a control token."""

    openers = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    make_id = staticmethod(mistral_call_id)

    def _call(self, opener: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("[", "{"):
            yield from self._objects()
            while (yield from self._has_more_objects()):
                yield from self._objects()
            return
        name = yield from self._name()
        yield from reader.skip_space()
        if (yield from reader.one_of("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
            # The model's own id, which need not be the only one of its kind.
            yield from reader.all_of(NAME_CHARACTERS)
            yield from reader.one_of("[ARGS]")
        yield from reader.skip_space()
        yield from self._pass_arguments(name)
