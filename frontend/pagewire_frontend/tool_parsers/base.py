"""What all tool parsers share: text goes in as it comes; content and calls come out as soon as
they are known.

A call is told from the moment its name and the beginning of its arguments are there. Before that a
text that turns out to be no call is content. After it the call stands: what the model writes up to
the call's end goes into the arguments as it is, right or wrong, whole or cut off, as OpenAI's API
does it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from pagewire_frontend.answers import (
    TOOL_NAME,
    AnswerPieces,
    ToolCallDelta,
    openai_call_id,
)
from pagewire_frontend.text_reader import Markers, Steps, TextReader
from pagewire_frontend.tool_parsers.json_text import MalformedError

Schema = Mapping[str, Any]
NAME_CHARACTERS = re.compile(r"[\w.:/-]*")


class ToolParser(ABC):
    """Takes one answer apart.

    Args:
        tools: OpenAI-shaped definitions.
        hidden: those of the format's markers that are control tokens, which no content shows.
        make_id: makes the calls' ids; None: as the format has them.
        only_these: a call of another tool is none.

    Attributes:
        openers: texts that begin a call, or several.
        closers: texts that end what an opener began.
        inner: the other texts of the format that models have tokens for.
        at_start: whether a call may begin the answer without an opener.
        make_id: makes the calls' ids, as the format has them.
    """

    openers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    inner: ClassVar[tuple[str, ...]] = ()
    at_start: ClassVar[bool] = False
    make_id: ClassVar[Callable[[], str]] = staticmethod(openai_call_id)

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        hidden: Collection[str] = frozenset(),
        make_id: Callable[[], str] | None = None,
        *,
        only_these: bool = False,
    ) -> None:
        self._schemas: dict[str, Schema] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._hidden = frozenset(hidden)
        self._only_these = only_these
        self._reader = TextReader()
        self._out = AnswerPieces(make_id or type(self).make_id)
        self._in_call = False
        self._head = 0
        self._steps = self._parse()

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Texts that may be control tokens of the model; the parser has to see them."""
        return (*cls.openers, *cls.closers, *cls.inner)

    @property
    def num_calls(self) -> int:
        """Calls that were told of."""
        return self._out.num_calls

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Content and calls that the new text settles."""
        self._reader.add(text)
        next(self._steps, None)
        return self._out.take()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """What is left now that the text has ended."""
        self._reader.ended = True
        next(self._steps, None)
        return self._out.take()

    @abstractmethod
    def _call(self, opener: str) -> Steps[None]:
        """Reads what follows an opener, which is "" at the answer's start.

        Raises:
            MalformedError: it is no call, or none to its end.
        """

    def _parse(self) -> Steps[None]:
        reader, out = self._reader, self._out
        markers = Markers(*self.markers())
        if self.at_start:
            reader.mark()
            yield from self._attempt("")
        while marker := (yield from reader.pass_trimmed(markers, out.content)):
            if marker in self.openers:
                yield from self._attempt(marker)
            elif out.num_calls and marker in self.closers:
                reader.forget()
            else:
                out.content(self._shown(reader.rewind(reader.since_mark), marker))
        space = reader.rewind(reader.since_mark)
        if not out.num_calls:
            out.content(space)

    def _attempt(self, opener: str) -> Steps[None]:
        """Reads calls where they may stand; what is none is content, and read again as such."""
        reader = self._reader
        self._head = reader.since_mark
        try:
            yield from self._call(opener)
        except MalformedError:
            if self._in_call:
                yield from reader.pass_until(Markers(*self.closers), self._out.arguments)
            else:
                self._out.content(self._shown(reader.rewind(self._head), opener))
        self._in_call = False
        reader.forget()

    def _begin(self, name: str) -> None:
        """The call is one: nobody will go back.

        Raises:
            MalformedError: of a tool that it may not be of.
        """
        if self._only_these and name not in self._schemas:
            raise MalformedError
        self._out.begin(name)
        self._in_call = True
        self._reader.forget()

    def _whole(self) -> None:
        """The call is whole. What follows may be no call, and then is content."""
        self._in_call = False
        self._head = 0
        self._reader.mark()

    def _name(self) -> Steps[str]:
        """The name of a call, as far as its characters go."""
        return check_name((yield from self._reader.all_of(NAME_CHARACTERS)))

    def _take(self, char: str) -> Steps[None]:
        if (yield from self._reader.take(1)) != char:
            raise MalformedError

    def _shown(self, text: str, marker: str) -> str:
        return text.removesuffix(marker) if marker in self._hidden else text


def check_name(name: str) -> str:
    """The name of a call. Raises MalformedError where it can't be one."""
    if not TOOL_NAME.fullmatch(name):
        raise MalformedError
    return name
