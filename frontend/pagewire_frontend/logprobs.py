"""Log probabilities with the text and the bytes of their tokens."""

from __future__ import annotations

from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire_frontend.generation_types import PositionTextLogprobs, TextLogprob
from pagewire_frontend.tokenizer import Tokenizer


def position_with_text(
    tokenizer: Tokenizer | None, position: PositionLogprobs, text_offset: int
) -> PositionTextLogprobs:
    """A position's log probabilities with text.

    Args:
        tokenizer: None where only token ids are served: texts and bytes are empty.
        text_offset: characters of the sequence's text before this token.
    """
    return PositionTextLogprobs(
        token=token_with_text(tokenizer, position.token),
        top=[token_with_text(tokenizer, token) for token in position.top],
        text_offset=text_offset,
    )


def token_with_text(tokenizer: Tokenizer | None, token: TokenLogprob) -> TextLogprob:
    """A token that is only part of a character has its real bytes, and U+FFFD for text. An id of
    the model's padding, which has no token, has neither."""
    data = b""
    if tokenizer is not None:
        data = tokenizer.token_bytes_of(token.token_id)
    return TextLogprob(
        token_id=token.token_id,
        logprob=token.logprob,
        rank=token.rank,
        text=data.decode("utf-8", "replace"),
        bytes=data,
    )
