"""`prompt_logprobs`, vLLM's field: the log probabilities of a prompt's own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire_frontend.openai_api.logprobs import LOWEST

if TYPE_CHECKING:
    from pagewire_frontend.tokenizer import Tokenizer

# Entries for each of which a text is made; more would hold up the streams of others.
_MANY_ENTRIES = 2_000

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


async def prompt_logprobs(
    positions: Sequence[PositionLogprobs], num_top: int, tokenizer: Tokenizer | None
) -> PromptLogprobs:
    """An entry for each token of the prompt, in vLLM's shape with bytes besides: by token id, the
    token that stands there and its `num_top` likeliest alternatives. The first has none: nothing
    predicts it.

    Args:
        positions: of the prompt, from its second token on.
        num_top: what was asked for; the positions may have more.
        tokenizer: None where the engine serves token ids only: then tokens have no text.
    """

    def make() -> PromptLogprobs:
        return [None, *(_entry(position, num_top, tokenizer) for position in positions)]

    if len(positions) * (num_top + 1) > _MANY_ENTRIES:
        return await asyncio.to_thread(make)
    return make()


def _entry(
    position: PositionLogprobs, num_top: int, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    tokens = (position.token, *position.top[:num_top])
    return {str(token.token_id): _described(token, tokenizer) for token in tokens}


def _described(token: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = data = None
    if tokenizer is not None:
        data = tokenizer.token_bytes_of(token.token_id)
        text = data.decode("utf-8", "replace")
    return {
        "logprob": max(token.logprob, LOWEST),
        "rank": token.rank,
        "decoded_token": text,
        # A token that is only part of a character has no text that tells it from others.
        "bytes": None if data is None else list(data),
    }
