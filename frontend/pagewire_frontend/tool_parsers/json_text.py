"""JSON that comes in pieces, passed on as it comes."""

from __future__ import annotations

import json
import re

from pagewire_frontend.text_reader import Emit, Steps, TextReader

# Deeper values are nobody's arguments.
MAX_DEPTH = 200
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_CLOSER = {"{": "}", "[": "]"}


class MalformedError(Exception):
    """The text is not what it had to be."""


def pass_json(reader: TextReader, emit: Emit) -> Steps[None]:
    """Passes one JSON value on. A raw control character in a string, which JSON forbids and models
    write all the same, is passed on escaped.

    Raises:
        MalformedError: the text is none, or ends within it. All that was read has been passed on.
    """
    closers: list[str] = []
    expects = "value"
    while True:
        yield from _pass_space(reader, emit)
        char = yield from reader.peek()
        if expects in ("next", "first key", "first value") and closers and char == closers[-1]:
            emit((yield from reader.take(1)))
            closers.pop()
        elif expects == "next":
            _require(char == ",")
            emit((yield from reader.take(1)))
            expects = "key" if closers[-1] == "}" else "value"
            continue
        elif expects in ("first key", "key"):
            yield from _pass_string(reader, emit)
            yield from _pass_space(reader, emit)
            _require((yield from reader.peek()) == ":")
            emit((yield from reader.take(1)))
            expects = "value"
            continue
        elif char in ("{", "["):
            _require(len(closers) < MAX_DEPTH)
            emit((yield from reader.take(1)))
            closers.append(_CLOSER[char])
            expects = "first key" if char == "{" else "first value"
            continue
        elif char == '"':
            yield from _pass_string(reader, emit)
        else:
            yield from _pass_scalar(reader, emit)
        if not closers:
            return
        expects = "next"


def read_json(reader: TextReader) -> Steps[str]:
    """One JSON value's text. Raises MalformedError as `pass_json` does."""
    pieces: list[str] = []
    yield from pass_json(reader, pieces.append)
    return "".join(pieces)


def read_string(reader: TextReader) -> Steps[str]:
    """What a JSON string says. Raises MalformedError where the text is none."""
    pieces: list[str] = []
    yield from _pass_string(reader, pieces.append)
    return str(json.loads("".join(pieces)))


def _pass_space(reader: TextReader, emit: Emit) -> Steps[None]:
    emit((yield from reader.all_of(_SPACE)))


def _pass_scalar(reader: TextReader, emit: Emit) -> Steps[None]:
    word = yield from reader.all_of(_WORD)
    emit(word)
    _require(_SCALAR.fullmatch(word) is not None)


def _pass_string(reader: TextReader, emit: Emit) -> Steps[None]:
    _require((yield from reader.peek()) == '"')
    emit((yield from reader.take(1)))
    while True:
        emit(reader.run(_PLAIN))
        char = yield from reader.peek()
        if char == '"':
            emit((yield from reader.take(1)))
            return
        if char == "\\":
            yield from _pass_escape(reader, emit)
        elif char and char < " ":
            yield from reader.take(1)
            emit(json.dumps(char)[1:-1])
        else:
            # More plain text has come in the meantime, or none ever will.
            _require(bool(char))


def _pass_escape(reader: TextReader, emit: Emit) -> Steps[None]:
    escape = yield from reader.take(2)
    emit(escape)
    if escape == "\\u":
        digits = yield from reader.take(4)
        emit(digits)
        _require(_HEX.fullmatch(digits) is not None)
    else:
        _require(escape[1:] in _ESCAPED)


def _require(holds: bool) -> None:
    if not holds:
        raise MalformedError
