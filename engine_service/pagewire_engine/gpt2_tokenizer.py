"""GPT-2's tokenizer from the two files it was published as; OPT uses the same pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from pagewire.errors import InvalidArgumentError

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_GPT2_END = "<|endoftext|>"


def tokenizer_json_from_vocab_and_merges(
    vocab: Path, merges: Path, files: Mapping[str, bytes]
) -> bytes:
    """A tokenizer.json equal to what transformers builds from the same folder.

    Args:
        vocab: vocab.json, token to id.
        merges: merges.txt, one merge a line in order of rank.
        files: the folder's tokenizer_config.json, special_tokens_map.json and added_tokens.json,
            where it has them.

    Raises:
        InvalidArgumentError: the two files do not fit together.
    """
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # tokenizers raises plain Exception
        raise InvalidArgumentError(
            "tokenizer", f"{vocab} and {merges.name} do not make a tokenizer: {error}"
        ) from error
    config = _json(files, "special_tokens_map.json") | _json(files, "tokenizer_config.json")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(config.get("add_prefix_space", False))
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, config, files)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    bos = _content(config.get("bos_token"))
    if config.get("add_bos_token") and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return tokenizer.to_str().encode()


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any], files: Mapping[str, bytes]) -> None:
    declared = config.get("added_tokens_decoder", {})
    for entry in (declared[key] for key in sorted(declared, key=int)):
        token = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", True),
            special=entry.get("special", False),
        )
        tokenizer.add_tokens([token])
    extra = _json(files, "added_tokens.json")
    tokenizer.add_tokens(sorted(extra, key=extra.__getitem__))
    special = [text for role in _ROLES if (text := _content(config.get(role)))]
    if not special and tokenizer.token_to_id(_GPT2_END) is not None:
        special = [_GPT2_END]
    tokenizer.add_special_tokens(list(dict.fromkeys(special)))


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return dict(json.loads(files[name])) if name in files else {}
