"""Text to token ids and back for clients that ask for just that, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pagewire.errors import InvalidArgumentError
from pagewire_frontend.generation import Generation
from pagewire_frontend.tokenizer import Tokenizer

# What can be tokenised at once, or the model's context where that is larger: enough to count the
# tokens of a book, and done within seconds.
MAX_CHARACTERS = 2_000_000
MAX_TOKEN_IDS = 1_000_000
_CHARACTERS_PER_TOKEN = 8

# Less than this is done at once: a thread would cost more.
_FEW_CHARACTERS = 8_000
_FEW_TOKEN_IDS = 4_000


async def tokenize(
    generation: Generation,
    text: str,
    *,
    add_special_tokens: bool = True,
    parse_special_tokens: bool | None = None,
) -> tuple[list[int], list[str]]:
    """The token ids of a text, and the text of each.

    Args:
        generation: whose tokenizer.
        text: the text.
        add_special_tokens: let the tokenizer add its control tokens.
        parse_special_tokens: read control tokens in the text as such; None: as in raw prompts,
            of which the operator decides.

    Raises:
        FailedPreconditionError: the engine serves token ids only.
        InvalidArgumentError: the text is too long, or not valid Unicode (the field is `text`).
    """
    tokenizer = generation.tokenizer
    limit = max(MAX_CHARACTERS, _CHARACTERS_PER_TOKEN * generation.model_info.max_model_len)
    if len(text) > limit:
        raise InvalidArgumentError(
            "text", f"has {len(text)} characters, and {limit} are tokenised at once; split it"
        )

    parses = parse_special_tokens
    if parses is None:
        parses = generation.settings.parse_control_tokens_in_prompts

    def encode() -> tuple[list[int], list[str]]:
        token_ids = tokenizer.encode(
            text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parses,
        )
        return token_ids, [tokenizer.token_text(token_id) for token_id in token_ids]

    return encode() if len(text) <= _FEW_CHARACTERS else await asyncio.to_thread(encode)


async def detokenize(
    generation: Generation, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """The text of token ids.

    Raises:
        FailedPreconditionError: the engine serves token ids only.
        InvalidArgumentError: there are too many, or one is outside the vocabulary (the field is
            `token_ids`).
    """
    tokenizer = generation.tokenizer
    vocab_size = generation.model_info.vocab_size
    limit = max(MAX_TOKEN_IDS, generation.model_info.max_model_len)
    if len(token_ids) > limit:
        raise InvalidArgumentError(
            "token_ids", f"{len(token_ids)} are more than the {limit} served at once; split them"
        )

    def decode() -> str:
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidArgumentError(
                    "token_ids", f"{token_id} is outside the vocabulary of {vocab_size}"
                )
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    return decode() if len(token_ids) <= _FEW_TOKEN_IDS else await asyncio.to_thread(decode)


def control_positions(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Indexes of the control tokens."""
    control = tokenizer.special_token_ids
    return [index for index, token_id in enumerate(token_ids) if token_id in control]


def bytes_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[bytes]:
    """What each token adds to the text."""
    return [tokenizer.token_bytes_of(token_id) for token_id in token_ids]
