"""Tokens as the scripts draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewire.v1 import inference_pb2
from pagewire_ui.text_client import Token

# More would hold a browser up; it is told how many there are.
MAX_DRAWN = 2000


def drawing(tokens: Sequence[Token], label: str) -> dict[str, Any]:
    """The value of a component of the script `tokens`.

    Args:
        tokens: of a text, in order.
        label: what they are, for screen readers.
    """
    drawn = [_value(token) for token in tokens[:MAX_DRAWN]]
    return {"label": label, "tokens": drawn, "total": len(tokens)}


def _value(token: Token) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    value: dict[str, Any] = {"id": token.token_id, "text": text}
    if "\ufffd" in text:
        value["bytes"] = token.data.hex(" ")
    if token.is_control:
        value["control"] = True
    return value


def with_alternatives(position: inference_pb2.PositionText) -> dict[str, Any]:
    """A token of an answer, with what else might have stood in its place."""
    token = position.token
    value = _value(Token(token.token_id, token.bytes or token.text.encode(), is_control=False))
    return {
        **value,
        "logprob": token.logprob,
        "rank": token.rank,
        "top": [
            {"id": other.token_id, "text": other.text, "logprob": other.logprob}
            for other in position.top
        ],
    }
