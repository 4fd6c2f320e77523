"""Whether an adapter's tokenizer means by its ids what the model's means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagewire_engine.adapters.errors import AdapterFileError, UnsupportedAdapterError

_FILE = "tokenizer.json"


def check_tokenizer(
    files: Mapping[str, bytes], of_model: Mapping[str, bytes], vocab_size: int
) -> None:
    """Holds the tokenizer that an adapter ships against the model's.

    Args:
        files: the adapter's.
        of_model: the model's; empty where token ids are served alone.
        vocab_size: rows of the model's embedding.

    Raises:
        UnsupportedAdapterError: an id means something else, or is beyond the embedding.
        AdapterFileError: a file can't be read.
    """
    if _FILE not in files or _FILE not in of_model or files[_FILE] == of_model[_FILE]:
        return
    theirs, ours = _vocabulary(files[_FILE]), _vocabulary(of_model[_FILE])
    for token, token_id in ours.items():
        if theirs.get(token, token_id) != token_id:
            raise UnsupportedAdapterError(
                f"its tokenizer gives {token!r} the id {theirs[token]}, and the model's "
                f"{token_id}: the adapter is of another model, or its vocabulary was rebuilt"
            )
    beyond = [token for token, token_id in theirs.items() if not 0 <= token_id < vocab_size]
    if beyond:
        raise UnsupportedAdapterError(
            f"its tokenizer has {len(beyond)} tokens beyond the model's vocabulary of "
            f"{vocab_size}, such as {beyond[0]!r}: adapters that add tokens are not served; merge "
            "it into its model by PEFT's merge_and_unload()"
        )
    others = {token_id: token for token, token_id in ours.items()}
    for token, token_id in theirs.items():
        if others.get(token_id, token) != token:
            raise UnsupportedAdapterError(
                f"its tokenizer calls {token_id} {token!r}, and the model's {others[token_id]!r}: "
                "the adapter is of another model, or its vocabulary was rebuilt"
            )


def _vocabulary(content: bytes) -> dict[str, int]:
    """Tokens and ids of a tokenizer.json, added ones included."""
    try:
        tokenizer: Any = json.loads(content)
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, dict):
            tokens = {str(token): int(token_id) for token, token_id in vocab.items()}
        else:  # Unigram's: pairs of token and score
            tokens = {str(entry[0]): index for index, entry in enumerate(vocab)}
        added = {str(each["content"]): int(each["id"]) for each in tokenizer["added_tokens"]}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise AdapterFileError(f"its {_FILE} can't be read ({type(error).__name__})") from error
    return tokens | added
