"""Errors the frontend raises. The shared types live in pagewire.errors; these are the frontend's
own."""

from __future__ import annotations

from pagewire.errors import FailedPreconditionError, InvalidArgumentError


class TokenIdsOnlyError(FailedPreconditionError):
    """The engine has no tokenizer. Each API says in its own words how it takes token ids.

    Args:
        remedy: what to send where.
    """

    def __init__(self, remedy: str = "send prompt_token_ids") -> None:
        super().__init__(
            f"this engine runs with --skip-tokenizer-init and serves token ids only; {remedy}"
        )


class TooManyTokensError(InvalidArgumentError):
    """A text has more tokens than there may be.

    Attributes:
        num_tokens: how many; a lower bound unless `exact`.
        limit: how many there may be.
    """

    def __init__(self, num_tokens: int, limit: int, *, exact: bool = True) -> None:
        self.num_tokens = num_tokens
        self.limit = limit
        self.exact = exact
        super().__init__("prompt", f"has {self.count} tokens, and may have {limit}; shorten it")

    @property
    def count(self) -> str:
        """The number for people."""
        return f"{self.num_tokens}" if self.exact else f"at least {self.num_tokens}"


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
