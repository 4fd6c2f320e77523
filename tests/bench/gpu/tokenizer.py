"""A tokenizer for models without one, so that a server under test makes text as it always does."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "Ġ"  # a space, as byte-level vocabularies write it


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a byte-level tokenizer.json: 256 bytes, then words that begin with a space."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [_SPACE + _word(number) for number in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def _word(number: int) -> str:
    """Letters that spell the number; no two alike."""
    letters = _LETTERS[number % 26]
    while number := number // 26:
        letters += _LETTERS[number % 26]
    return letters + "."
