"""A request's prompt as token ids, and what of the model's context is left for its output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client.base import ModelInfo
from pagewire_frontend.errors import TooManyTokensError
from pagewire_frontend.tokenizer import Tokenizer

# Above this many characters tokenising would hold up the other streams of the event loop.
_LONG_TEXT = 8_000


def checked_token_ids(given: list[int], info: ModelInfo) -> list[int]:
    """A copy of a prompt's token ids.

    Raises:
        InvalidArgumentError: there are none or too many, or one is outside the vocabulary.
    """
    if len(given) >= info.max_model_len:
        raise _over_the_context(str(len(given)), info.max_model_len)
    token_ids = list(given)
    if not token_ids:
        raise InvalidArgumentError("prompt_token_ids", "must hold at least one token")
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < info.vocab_size)
        raise InvalidArgumentError(
            "prompt_token_ids", f"{wrong} is outside the vocabulary of {info.vocab_size}"
        )
    return token_ids


async def encoded_text(
    text: str,
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    add_special_tokens: bool,
    parse_special_tokens: bool,
) -> list[int]:
    """The token ids of a prompt's text; see `Tokenizer.encode`.

    Raises:
        InvalidArgumentError: there are none or too many.
    """

    def encode() -> list[int]:
        return tokenizer.encode(
            text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            max_tokens=max_model_len - 1,
        )

    with naming_the_context(max_model_len):
        token_ids = await asyncio.to_thread(encode) if len(text) > _LONG_TEXT else encode()
    if not token_ids:
        raise InvalidArgumentError("prompt", "is empty: it makes no token")
    return token_ids


def resolved(
    params: SamplingParams,
    prompt_tokens: int,
    info: ModelInfo,
    *,
    has_tokenizer: bool,
    default_max_tokens: int | None,
) -> SamplingParams:
    """The parameters with `max_tokens` filled in, checked against the model.

    Args:
        default_max_tokens: where they name none; None: what the context has left.

    Raises:
        InvalidArgumentError: prompt and output do not fit, or a token id is out of range.
    """
    limit = info.max_model_len
    if prompt_tokens >= limit:
        raise _over_the_context(str(prompt_tokens), limit)
    params.check_vocabulary(info.vocab_size)
    if params.stop and not has_tokenizer:
        raise InvalidArgumentError("stop", "this engine serves token ids only: no stop strings")
    left = limit - prompt_tokens
    if params.max_tokens is None:
        if params.min_tokens > left:
            raise InvalidArgumentError(
                "min_tokens", f"{params.min_tokens} is more than the {left} that fit"
            )
        if default_max_tokens is not None:
            left = min(left, max(default_max_tokens, params.min_tokens))
        return replace(params, max_tokens=left)
    if params.max_tokens > left:
        raise InvalidArgumentError(
            "max_tokens",
            f"{params.max_tokens} after a prompt of {prompt_tokens} tokens is over the model's "
            f"context of {limit}; at most {left} fit",
        )
    return params


@contextmanager
def naming_the_context(limit: int) -> Iterator[None]:
    """Says of a prompt that is too long what limits it."""
    try:
        yield
    except TooManyTokensError as error:
        raise _over_the_context(error.count, limit) from None


def _over_the_context(count: str, limit: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        "prompt",
        f"has {count} tokens, and the model's context of {limit} must hold the output too; "
        "shorten it",
    )
