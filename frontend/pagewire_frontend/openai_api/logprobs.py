"""Log probabilities in the shapes of both endpoints. All are raw: of the model's distribution
before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagewire_frontend.generation_types import PositionTextLogprobs, TextLogprob

# OpenAI's value for "very unlikely", in place of minus infinity, which JSON lacks.
LOWEST = -9999.0


def chat_logprobs(positions: Iterable[PositionTextLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            {**_chat_token(position.token), "top_logprobs": [_chat_token(t) for t in position.top]}
            for position in positions
        ],
        "refusal": None,
    }


def _chat_token(token: TextLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": max(token.logprob, LOWEST),
        "bytes": list(token.bytes),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions, filled position by position.

    Args:
        num_top: the request's `logprobs`; 0 gives no alternatives.

    Attributes:
        num_top: the same.
    """

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._offsets: list[int] = []
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []

    def add_first(self, token: TextLogprob) -> None:
        """The first token of an echoed prompt, which nothing predicts."""
        self._offsets.append(0)
        self._tokens.append(token_name(token))
        self._logprobs.append(None)
        self._top.append(None)

    def add(self, positions: Sequence[PositionTextLogprobs], offset: int) -> None:
        """Positions whose `text_offset` counts from `offset` in the choice's text."""
        for position in positions:
            token = position.token
            self._offsets.append(offset + position.text_offset)
            self._tokens.append(token_name(token))
            self._logprobs.append(max(token.logprob, LOWEST))
            # The likeliest first, and the token that was taken even when it is not among them.
            top: dict[str, float] = {}
            for candidate in (*position.top, token):
                top.setdefault(token_name(candidate), max(candidate.logprob, LOWEST))
            self._top.append(top)

    def as_json(self) -> dict[str, Any]:
        return {
            "text_offset": self._offsets,
            "token_logprobs": self._logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top if self.num_top else None,
        }


def token_name(token: TextLogprob) -> str:
    """A token's text; `bytes:\\xe4\\xb8` where its bytes alone are no text, so that two such tokens
    keep two names."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
