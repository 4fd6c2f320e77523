"""DeepSeek's calls, between control tokens."""

from __future__ import annotations

import re

from pagewire_frontend.text_reader import Steps
from pagewire_frontend.tool_parsers.json_calls import JsonCallParser
from pagewire_frontend.tool_parsers.json_text import MalformedError

_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE_END = re.compile(r"[\s`}\]]*")


class DeepSeekParser(JsonCallParser):
    """V3.1 writes name, separator, arguments; V3 and R1 write a type, separator, the name, and the
    arguments as a block of Markdown."""

    openers = (_CALL, _CALLS)
    closers = (_CALL_END, _CALLS_END)
    inner = (_SEPARATOR,)

    def _call(self, opener: str) -> Steps[None]:
        reader = self._reader
        if opener == _CALLS:
            yield from reader.skip_space()
            if not (yield from reader.one_of(_CALL)):
                raise MalformedError
        name = yield from self._name()
        if not (yield from reader.one_of(_SEPARATOR)):
            raise MalformedError
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            name = yield from self._name()
            yield from reader.skip_space()
            yield from reader.one_of("```json")
            yield from reader.skip_space()
        yield from self._pass_arguments(name)
        yield from reader.all_of(_FENCE_END)
        yield from reader.pass_end_of(_CALL_END)
