"""Errors the frontend raises. The shared types live in pagewire.errors; these are the frontend's
own."""

from __future__ import annotations

from pagewire.errors import InvalidArgumentError


class ChatTemplateError(InvalidArgumentError):
    """A chat template failed to parse or render.

    Attributes:
        line: 1-based line in the template, 0 where unknown.
        column: 1-based column, 0 where unknown.
    """

    def __init__(
        self, message: str, *, line: int = 0, column: int = 0, field: str = "chat_template"
    ) -> None:
        super().__init__(field, message)
        self.line = line
        self.column = column
