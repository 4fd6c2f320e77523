"""Text to token ids and back, on `tokenizers`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as HubTokenizer

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_frontend.errors import TooManyTokensError
from pagewire_frontend.text_bounds import TextBound
from pagewire_frontend.token_bytes import TokenBytes, token_bytes_for

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


# How much of a long text is looked at first, where only its first tokens count.
_CHARACTERS_PER_TOKEN = 32
_MARGIN = 1024


class Tokenizer:
    """A model's tokenizer, made of its files.

    Control tokens are the added tokens that the tokenizer marks as special, such as `<|im_end|>`.
    All methods may be called from any thread.

    Attributes:
        special_tokens: role to text, such as {"bos_token": "<s>"}; chat templates read them.
        special_token_ids: ids of the control tokens.
        bos_token_id, eos_token_id: None where the model has none.
        vocab_size: one past the highest id that has a token. A model's own vocabulary may be padded
            beyond it.
    """

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any] | None = None) -> None:
        try:
            self._parsing = _without_limits(HubTokenizer.from_buffer(tokenizer_json))
        except Exception as error:  # tokenizers raises plain Exception and ValueError
            raise FailedPreconditionError(
                f"the model's tokenizer.json can't be read ({error}); name another tokenizer "
                "with --tokenizer"
            ) from error
        self._added: dict[int, AddedToken] = self._parsing.get_added_tokens_decoder()
        self.special_tokens = _special_tokens(config or {})
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._added.items() if token.special
        )
        self.bos_token_id = self._role_id("bos_token")
        self.eos_token_id = self._role_id("eos_token")
        model_size = self._parsing.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max([model_size, *(token_id + 1 for token_id in self._added)])
        self.token_bytes: TokenBytes | None = token_bytes_for(self._parsing)
        content = json.loads(tokenizer_json)
        self._bound = TextBound.of(content)
        self._plain = _PlainEncoder(
            content, [token.content for token in self._added.values() if token.special]
        )

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """From files by Hugging Face's names; tokenizer.json must be among them."""
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if name in files:
                config |= json_object(name, files[name])
        return cls(files["tokenizer.json"], config)

    @property
    def hub_tokenizer(self) -> HubTokenizer:
        """The `tokenizers.Tokenizer` underneath."""
        return self._parsing

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the text.

        Args:
            add_special_tokens: let the tokenizer add its own (a BOS, as a rule). A text that begins
                with the BOS gets no second one.
            parse_special_tokens: read control tokens in the text as such; False takes them as
                ordinary text.
            max_tokens: of how many there may be. A text that can't be so few is refused before it
                is tokenised.

        Raises:
            InvalidArgumentError: the text is not valid Unicode.
            TooManyTokensError: there are more than `max_tokens`.
        """
        self._check(text, max_tokens)
        if not parse_special_tokens:
            return self._plain.encode(
                text, (), add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        ids = _encode(self._parsing, text, add_special_tokens, max_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def encode_pair(
        self,
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        max_tokens: int,
        truncate: bool = False,
    ) -> tuple[list[int], int]:
        """Token ids of a text, or of two with what the tokenizer puts between them.

        Args:
            text: the first text.
            second: the second.
            add_special_tokens, parse_special_tokens: see `encode`.
            max_tokens: of how many there may be, those that are added included.
            truncate: cut the end of the last text, where there would be more; of a second text at
                least one token must stay.

        Returns:
            The ids, and the index of the first that belongs to the second text; 0 where there is
            none, or the tokenizer does not tell the two apart.

        Raises:
            InvalidArgumentError: a text is not valid Unicode.
            TooManyTokensError: there are more than `max_tokens`, or than may be of what can't be
                cut.
        """
        texts = [text] if second is None else [text, second]
        for one in texts:
            self._check(one, None if truncate else max_tokens)
        tokenizer = self._parsing if parse_special_tokens else self._plain.tokenizer
        read = [_beginning(tokenizer, one, max_tokens) for one in texts]
        parts = [encoding for encoding, _ in read]
        room = max_tokens
        if add_special_tokens:
            room -= tokenizer.num_special_tokens_to_add(second is not None)
        uncut = sum(len(part) for part in (parts[:-1] if truncate else parts))
        least = uncut + (truncate and second is not None and len(parts[-1]) > 0)
        if least > room:
            all_read = all(whole for _, whole in read)
            raise TooManyTokensError(least + max_tokens - room, max_tokens, exact=all_read)
        if truncate and uncut + len(parts[-1]) > room:
            parts[-1].truncate(room - uncut)
        other = parts[1] if second is not None else None
        whole = tokenizer.post_process(parts[0], other, add_special_tokens)
        ids = list(whole.ids)
        if second is not None:
            kinds = whole.type_ids
            return ids, kinds.index(1) if 1 in kinds else 0
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:], 0
        return ids, 0

    def encode_marked(
        self,
        text: str,
        control_spans: Sequence[tuple[int, int]],
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a text in which only the control tokens at `control_spans` are read as such.

        Nothing is added. Otherwise equal to `encode`: the text is tokenised in one piece.

        Args:
            control_spans: (start, end) of each, in order; each spans one control token's text.
            max_tokens: see `encode`.
        """
        self._check(text, max_tokens)
        return self._plain.encode(
            text, control_spans, add_special_tokens=False, max_tokens=max_tokens
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; U+FFFD where their bytes are not valid UTF-8. An id without a token has
        no text."""
        if self.token_bytes is not None:
            return self.token_bytes.decode(ids, skip_special_tokens=skip_special_tokens)
        known = [token_id for token_id in ids if self.has_token(token_id)]
        return str(self._parsing.decode(known, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as `Ġthe` or `<0x0A>`.

        Raises:
            InvalidArgumentError: the id has no token.
        """
        if not self.has_token(token_id):
            raise InvalidArgumentError(
                "token_ids", f"the tokenizer has no token with the id {token_id}"
            )
        return str(self._parsing.id_to_token(token_id))

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None when it has none."""
        found = self._parsing.token_to_id(token)
        return None if found is None else int(found)

    def has_token(self, token_id: int) -> bool:
        """Whether the id has a token; a model's padding of the vocabulary has none."""
        return 0 <= token_id < 2**32 and self._parsing.id_to_token(token_id) is not None

    def token_bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text, in bytes; a lone byte of a character is that byte, and an
        id without a token adds nothing."""
        if self.token_bytes is not None:
            return self.token_bytes.with_special[token_id]
        if not self.has_token(token_id):
            return b""
        return str(self._parsing.decode([token_id], skip_special_tokens=False)).encode()

    def token_text(self, token_id: int) -> str:
        """The same as text; U+FFFD where its bytes alone are not valid UTF-8."""
        return self.token_bytes_of(token_id).decode("utf-8", "replace")

    def special_token_text(self, token_id: int) -> str | None:
        """The text of a control token; None for every other id."""
        if token_id not in self.special_token_ids:
            return None
        return str(self._added[token_id].content)

    def _check(self, text: str, max_tokens: int | None) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                "prompt",
                f"the text is not valid Unicode at character {error.start} (lone surrogate)",
            ) from None
        if max_tokens is not None and self._bound is not None:
            at_least = self._bound.min_tokens(text, max_tokens)
            if at_least > max_tokens:
                raise TooManyTokensError(at_least, max_tokens, exact=False)

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.token_id(text)


class _PlainEncoder:
    """Encodes text whose control tokens are ordinary text, but for those at given places.

    It is the same tokenizer with its control tokens renamed to aliases that no text can contain.
    (tokenizers' `encode_special_tokens` is not enough: a Unigram model, or a merge, may still make
    a control token of its spelling.) One call tokenises the whole, so that whatever depends on the
    place in the text (a prefix space, white space stripped around a token) comes out as always.
    """

    def __init__(self, tokenizer: dict[str, Any], control_tokens: Iterable[str]) -> None:
        """`tokenizer` is a tokenizer.json's content, and is changed."""
        nonce = secrets.token_hex(8)
        self._aliases = {
            text: f"\U000f0000{nonce}.{n}\U000f0001" for n, text in enumerate(control_tokens)
        }
        renamed = _renamed(tokenizer, self._aliases)
        self.tokenizer = _without_limits(HubTokenizer.from_str(json.dumps(renamed)))

    def encode(
        self,
        text: str,
        spans: Iterable[tuple[int, int]],
        *,
        add_special_tokens: bool,
        max_tokens: int | None,
    ) -> list[int]:
        pieces: list[str] = []
        at = 0
        for start, end in spans:
            pieces += (text[at:start], self._aliases[text[start:end]])
            at = end
        pieces.append(text[at:])
        return _encode(self.tokenizer, "".join(pieces), add_special_tokens, max_tokens)


def _renamed(tokenizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json with tokens renamed; their ids stay, and no merge leads to them."""
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": False}
    model = tokenizer["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        merges = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [
            [left, right]
            for left, right in merges
            if not (left + right in names or left in names or right in names)
        ]
    return tokenizer


def _without_limits(tokenizer: HubTokenizer) -> HubTokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encode(
    tokenizer: HubTokenizer, text: str, add_special_tokens: bool, max_tokens: int | None
) -> list[int]:
    # `encode` keeps the interpreter's lock for as long as it runs; the batch call does not.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    # Before there is a list: to make one of millions of ids would hold up all other threads.
    if max_tokens is not None and len(encoding) > max_tokens:
        raise TooManyTokensError(len(encoding), max_tokens)
    return list(encoding.ids)


def _beginning(tokenizer: HubTokenizer, text: str, max_tokens: int) -> tuple[Encoding, bool]:
    """The tokens of a text, or of so much of its beginning that there are far more than
    `max_tokens`: of a text of megabytes, the rest would take seconds to be cut off. What stands
    far behind a token has no part in it: tokenizers look at a text word by word. Also whether those
    are all."""
    length = _CHARACTERS_PER_TOKEN * max_tokens + _MARGIN
    while True:
        (encoding,) = tokenizer.encode_batch_fast([text[:length]], add_special_tokens=False)
        if length >= len(text) or len(encoding) > 2 * max_tokens + _MARGIN:
            return encoding, length >= len(text)
        length *= 4


def json_object(name: str, data: bytes) -> dict[str, Any]:
    """One of the model's JSON files. Raises FailedPreconditionError where it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FailedPreconditionError(f"the model's {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FailedPreconditionError(f"the model's {name} holds no JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {role: _content(config.get(role)) for role in _ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
