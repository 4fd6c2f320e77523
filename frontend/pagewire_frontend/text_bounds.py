"""How few tokens a text can have, told from its length alone: to tokenise a text of many megabytes
takes half a minute, and to see that it can't fit should take none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

# Composition (NFC) makes at most nine bytes, a Hangul syllable's three letters, into three.
_COMPOSITION = 3
_KEEPING_PRE_TOKENIZERS = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"))


@dataclass(frozen=True, slots=True)
class TextBound:
    """The bound of one tokenizer, for those that drop nothing of a text: each byte of it is in a
    token.

    Attributes:
        bytes_per_token: of text, at most.
        strips_white_space: added tokens swallow the white space beside them, however much.
    """

    bytes_per_token: int
    strips_white_space: bool

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any]) -> TextBound | None:
        """The bound of a tokenizer.json's content; None where a text of any length may become a
        single token: an unknown word, or something that is normalised away."""
        shrinking = _shrinking(tokenizer.get("normalizer"))
        vocab = tokenizer["model"].get("vocab")
        if shrinking is None or not isinstance(vocab, dict) or tokenizer["model"].get("dropout"):
            return None
        if not _keeps_all(tokenizer.get("pre_tokenizer")):
            return None
        if _has_byte_level(tokenizer) and all(char in vocab for char in ByteLevel.alphabet()):
            longest = max(map(len, vocab))  # a character for each byte
        elif tokenizer["model"].get("byte_fallback") and all(
            f"<0x{byte:02X}>" in vocab for byte in range(256)
        ):
            longest = max(len(token.encode()) for token in vocab)
        else:
            return None
        added = tokenizer.get("added_tokens") or ()
        longest = max([longest, *(len(token["content"].encode()) for token in added)])
        strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
        return cls(longest * shrinking, strips)

    def min_tokens(self, text: str, limit: int) -> int:
        """The fewest tokens that the text can have; exact enough to tell whether these are more
        than `limit`."""
        fewest = -(-len(text.encode()) // self.bytes_per_token)
        if fewest > limit and self.strips_white_space:
            fewest = -(-len("".join(text.split()).encode()) // self.bytes_per_token)
        return fewest


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """By what factor normalising can shorten a text; None: without bound."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        total = 1
        for step in normalizer["normalizers"]:
            factor = _shrinking(step)
            if factor is None:
                return None
            total *= factor
        return total
    if kind == "NFC":
        return _COMPOSITION
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        if pattern and len(normalizer["content"].encode()) >= len(pattern.encode()):
            return 1
    return None


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_keeps_all(step) for step in pre_tokenizer["pretokenizers"])
    return (
        pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS
        and pre_tokenizer.get("behavior") != "Removed"
    )


def _has_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    for part, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = tokenizer.get(part) or {}
        if any(one.get("type") == "ByteLevel" for one in (step, *step.get(inner, ()))):
            return True
    return False
