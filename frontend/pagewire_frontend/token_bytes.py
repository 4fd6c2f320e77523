"""The bytes each token stands for, in the two families of tokenizers that language models use.

Byte-level BPE (GPT-2, Llama 3, Qwen) spells every byte as one printable character. SentencePiece
(Llama 2, Mistral, Gemma) spells a space as U+2581 and bytes it has no piece for as `<0xE4>`. In
both, a text is the tokens' bytes, one after the other, read as UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Table(dict[int, bytes]):
    """Token id to bytes, filled as ids come up: a whole vocabulary takes a while, and most of it is
    never asked for. An id without a token has none: models pad their vocabulary beyond their
    tokenizer's, and may sample from the padding."""

    def __init__(self, tokenizer: HubTokenizer, rules: _Rules, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._rules = rules
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""  # not kept: there is no end of such ids
        spelt = b"" if token_id in self._skipped else self._rules.bytes_of(token)
        self[token_id] = spelt
        return spelt


class TokenBytes:
    """Token ids to bytes.

    Attributes:
        with_special, without_special: token id to bytes, b"" for an id that has no token; the
            second gives b"" for control tokens too.
        first_spaces: how many spaces are dropped at the very start of a text.
        first_token_spaces: whether those of the first token are, as Metaspace has it.
    """

    def __init__(self, tokenizer: HubTokenizer, rules: _Rules) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._make_table = partial(_Table, tokenizer, rules)
        self.with_special = self._make_table(frozenset())
        self.without_special = self._make_table(self._special)
        self._showing: dict[frozenset[int], _Table] = {}
        self.first_spaces = rules.first_spaces
        self.first_token_spaces = rules.first_token_spaces

    def table(
        self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> dict[int, bytes]:
        """Token id to bytes.

        Args:
            skip_special_tokens: control tokens have none.
            shown: control tokens that have theirs all the same. A table is kept for each such set.
        """
        if not skip_special_tokens:
            return self.with_special
        if not shown:
            return self.without_special
        if shown not in self._showing:
            self._showing[shown] = self._make_table(self._special - shown)
        return self._showing[shown]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text; U+FFFD for each maximal run of bytes that is no character."""
        table = self.table(skip_special_tokens=skip_special_tokens)
        pieces = [table[i] for i in ids]
        if self.first_token_spaces:
            drop_spaces_of_first_token(pieces)
        text = b"".join(pieces).decode("utf-8", "replace")
        return drop_first_spaces(text, self.first_spaces)[0]


def drop_first_spaces(text: str, count: int) -> tuple[str, int]:
    """The text without up to `count` leading spaces, and how many may still be dropped from what
    follows it."""
    while count and text.startswith(" "):
        text, count = text[1:], count - 1
    return text, (0 if text else count)


def drop_spaces_of_first_token(pieces: list[bytes]) -> bool:
    """Takes the spaces out of the first token that is there, if one is."""
    for n, piece in enumerate(pieces):
        if piece:
            pieces[n] = piece.replace(b" ", b"")
            return True
    return False


@dataclass(frozen=True)
class _Rules:
    """How tokens are spelt."""

    byte_level: bool = False
    byte_fallback: bool = False
    space: str | None = None
    first_spaces: int = 0
    first_token_spaces: bool = False

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # an added token is spelt as it is
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return (token.replace(self.space, " ") if self.space else token).encode()


def token_bytes_for(tokenizer: HubTokenizer) -> TokenBytes | None:
    """The tokenizer's bytes, or None when its decoder is of neither family."""
    decoder = tokenizer.decoder
    rules = None if decoder is None else _rules(json.loads(decoder.__getstate__()))
    return None if rules is None else TokenBytes(tokenizer, rules)


def _rules(decoder: dict[str, Any]) -> _Rules | None:
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Rules(byte_level=True)
    if kinds == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        return _Rules(space=steps[0]["replacement"], first_token_spaces=scheme != "never")
    if not kinds or any(kind not in ("Replace", "ByteFallback", "Fuse", "Strip") for kind in kinds):
        return None
    space, first_spaces = None, 0
    for step in steps:
        if step["type"] == "Replace":
            if step["pattern"] != {"String": _SPACE} or step["content"] != " " or space:
                return None
            space = _SPACE
        if step["type"] == "Strip":
            if step["content"] != " " or step["stop"] != 0 or "Fuse" not in kinds:
                return None
            first_spaces = step["start"]
    return _Rules(byte_fallback="ByteFallback" in kinds, space=space, first_spaces=first_spaces)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _bytes_of_chars() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, others for characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF = _bytes_of_chars()
