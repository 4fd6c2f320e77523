"""Keeps control tokens that a client wrote into a chat apart from those that the template wrote.

Before rendering, characters that could begin a control token are replaced, in all that the client
sent, by stand-ins: single characters that occur nowhere in the request. A control token found in
the rendered text is therefore the template's own; the stand-ins are then turned back. The template
sees strings of the same length with the same white space, so it treats them alike, unless it looks
for that very text (such as `</think>` in an answer). Where that changes what is rendered, only
whole control tokens, and ends of strings that begin one, are replaced; then everything else is
looked at as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_STAND_INS = range(0xF0000, 0xFFFFE)  # a private use area


class ControlTokenGuard:
    """Guards against the given control tokens."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        tokens = sorted({token for token in control_tokens if token}, key=len, reverse=True)
        self._first_characters = frozenset(token[0] for token in tokens)
        self._prefixes = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def render(
        self, render: Callable[[Any], str], client_data: Any
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Renders what the client sent.

        Args:
            render: makes the text of data shaped as `client_data`.
            client_data: JSON-like; all its strings are the client's.

        Returns:
            The text, and the places of its control tokens that the template wrote; None when every
            control token in the text is the template's.
        """
        text = render(client_data)
        characters: set[str] = set()
        for string in _strings(client_data):  # one by one: other threads get their turn
            characters.update(string)
        suspects = characters & self._first_characters
        if not suspects:
            return text, None
        stand_ins = self._choose_stand_ins(characters | set(text), suspects)
        to_stand_in = {ord(char): ord(stand_in) for char, stand_in in stand_ins.items()}
        back = {ord(stand_in): ord(char) for char, stand_in in stand_ins.items()}
        guarded = render(_map_strings(client_data, lambda s: s.translate(to_stand_in)))
        if guarded.translate(back) != text:
            guarded = render(
                _map_strings(client_data, lambda s: self._replace_tokens(s, to_stand_in))
            )
        restored = guarded.translate(back)
        spans = [match.span() for match in self._tokens.finditer(guarded)]
        if spans == [match.span() for match in self._tokens.finditer(restored)]:
            return restored, None
        return restored, spans

    def _replace_tokens(self, text: str, to_stand_in: dict[int, int]) -> str:
        text = self._tokens.sub(lambda match: match[0].translate(to_stand_in), text)
        end = len(text.rstrip())  # templates strip white space before they go on
        for n in range(min(self._longest - 1, end), 0, -1):
            if text[end - n : end] in self._prefixes:
                return text[: end - n] + text[end - n : end].translate(to_stand_in) + text[end:]
        return text

    @staticmethod
    def _choose_stand_ins(used: set[str], suspects: set[str]) -> dict[str, str]:
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        return dict(zip(sorted(suspects), free, strict=False))


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _strings(item)


def _map_strings(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_map_strings(item, change) for item in data]
    return data
