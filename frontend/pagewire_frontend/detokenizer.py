"""Token ids to text, as they come.

`tokenizers`' DecodeStream holds everything back while the text ends in U+FFFD and decodes it again
at each step, refuses to go on where a byte of a byte-fallback tokenizer turns out wrong, and emits
the prompt when that ends within a character. So the tokenizers whose text is the tokens' bytes are
decoded from these bytes, in constant time a token; DecodeStream serves the others.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from pagewire_frontend.token_bytes import (
    TokenBytes,
    drop_first_spaces,
    drop_spaces_of_first_token,
)
from pagewire_frontend.tokenizer import Tokenizer

_PROMPT_TAIL = 8  # tokens; a character has at most four bytes
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one sequence. Joined, the pieces are the text of all the ids."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that the new ids complete. An id without a token has no text."""
        ...

    @property
    def within_character(self) -> bool:
        """Whether the ids so far end within a character, or may."""
        ...

    def finish(self) -> str:
        """What was held back: U+FFFD for bytes that no longer can become a character."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A detokenizer of what follows the prompt. Nothing of the prompt's text comes out of it, nor a
    character that the prompt began.

    Args:
        skip_special_tokens: control tokens have no text.
        shown: control tokens that have theirs all the same.
    """
    tail = prompt_token_ids[-_PROMPT_TAIL:]
    if tokenizer.token_bytes is not None:
        table = tokenizer.token_bytes.table(skip_special_tokens=skip_special_tokens, shown=shown)
        return BytesDetokenizer(tokenizer.token_bytes, table, tail)
    if not (skip_special_tokens and shown):
        return StreamDetokenizer(tokenizer, tail, skip_special_tokens=skip_special_tokens)
    return StreamDetokenizer(
        tokenizer, tail, skip_special_tokens=False, left_out=tokenizer.special_token_ids - shown
    )


class BytesDetokenizer:
    """For tokenizers whose text is their tokens' bytes."""

    __slots__ = ("_begun", "_decode", "_decoder", "_first_spaces", "_first_token", "_table")

    def __init__(
        self, token_bytes: TokenBytes, table: dict[int, bytes], prompt_tail: Sequence[int]
    ) -> None:
        self._table = table
        self._decoder = _utf8_decoder("replace")
        self._decode = self._decoder.decode
        prompt = b"".join([self._table[i] for i in prompt_tail])
        self._first_spaces = 0 if prompt else token_bytes.first_spaces
        self._first_token = not prompt and token_bytes.first_token_spaces
        self._begun = unfinished_character(prompt)

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[i] for i in ids])
        if self._first_token:
            data = self._without_first_spaces([table[i] for i in ids])
        if self._begun:
            data = self._without_prompts_character(data)
        text = self._decode(data)
        if self._first_spaces:
            text, self._first_spaces = drop_first_spaces(text, self._first_spaces)
        return text

    @property
    def within_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        return self._decode(b"", True)

    def _without_first_spaces(self, pieces: list[bytes]) -> bytes:
        self._first_token = not drop_spaces_of_first_token(pieces)
        return b"".join(pieces)

    def _without_prompts_character(self, data: bytes) -> bytes:
        for used in range(len(data)):
            begun = self._begun + data[used : used + 1]
            if unfinished_character(begun) == begun:
                self._begun = begun
                continue
            self._begun = b""
            return data[used + 1 :] if _is_character(begun) else data[used:]
        return b""


class StreamDetokenizer:
    """For any other tokenizer, on DecodeStream."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int],
        *,
        skip_special_tokens: bool,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._left_out = left_out
        known = [i for i in prompt_tail if tokenizer.has_token(i) and i not in left_out]
        while known and self._text(known).endswith("\ufffd"):
            known.pop()
        self._stream = DecodeStream(known, skip_special_tokens)
        self._context = known  # ids before those held back, enough to tell their spacing
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._step(i) for i in ids])

    @property
    def within_character(self) -> bool:
        return bool(self._held)

    def finish(self) -> str:
        return self._release()

    def _step(self, token_id: int) -> str:
        if not self._tokenizer.has_token(token_id) or token_id in self._left_out:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.hub_tokenizer, token_id)
        except Exception:  # DecodeStream raises plain Exception: earlier text has changed
            text = self._release()
            self._stream = DecodeStream(self._context, self._skip)
        if text:
            self._context = self._held[-_PROMPT_TAIL:]
            self._held = []
        return text or ""

    def _release(self) -> str:
        if not self._held:
            return ""
        before = self._text(self._context)
        text = self._text([*self._context, *self._held])
        self._context, self._held = self._held[-_PROMPT_TAIL:], []
        return text.removeprefix(before)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.hub_tokenizer.decode(ids, skip_special_tokens=self._skip))


def unfinished_character(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a UTF-8 character and do not finish it."""
    decoder = _utf8_decoder("replace")
    decoder.decode(data)
    pending, _ = decoder.getstate()
    return pending


def _is_character(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
