"""Hugging Face tokenizer files from a GGUF file's metadata.

Sources: the pre-tokenizers' names and patterns follow llama.cpp's src/llama-vocab.cpp and the
original models' tokenizer.json files; merges of a SentencePiece vocabulary follow from its scores
as in transformers' convert_slow_tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from pagewire.errors import InvalidArgumentError

_SPACE = "▁"  # SentencePiece writes a space so


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files_from_gguf(metadata: Mapping[str, Any], *, source: str) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and the chat templates.

    Args:
        metadata: the file's keys, as `read_gguf_metadata` gives them.
        source: the file's name, for errors.

    Raises:
        InvalidArgumentError: the vocabulary is of a kind that is not known here. A guess would
            tokenise wrongly without a word.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise InvalidArgumentError("tokenizer", f"{source} holds no vocabulary; {_REMEDY}")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(metadata, source)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, source)
    else:
        raise InvalidArgumentError(
            "tokenizer", f"{source} has a tokenizer of the unknown kind {kind!r}; {_REMEDY}"
        )
    config = _config(metadata)
    tokenizer["added_tokens"] = _added_tokens(metadata)
    tokenizer["post_processor"] = _post_processor(config, tokens)
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
        **_chat_templates(metadata),
    }


_REMEDY = "name a folder with the model's tokenizer.json by --tokenizer"

# Byte-level BPE ------------------------------------------------------------------------------

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_PLAIN_GPT2 = _byte_level(use_regex=True)
# transformers loses these single digits when it converts a GGUF file.
_SINGLE_DIGITS_GPT2 = _sequence(
    {"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)
)
_LLAMA_CPP_DEFAULT = _sequence(
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(_GPT2),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    _byte_level(use_regex=False),
)


def _by_pattern(pattern: str) -> dict[str, Any]:
    return _sequence(_split(pattern), _byte_level(use_regex=False))


_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": _LLAMA_CPP_DEFAULT,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo"), _PLAIN_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _SINGLE_DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _by_pattern(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _by_pattern(_QWEN2)),
    "tekken": _by_pattern(_TEKKEN),
}
# A word that is itself in the vocabulary is taken whole, whatever the merges say.
_WHOLE_WORDS = frozenset(("llama-bpe", "llama3", "llama-v3", "tekken"))
_COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen"))
_ADDS_BOS = frozenset(("llama-bpe", "llama3", "llama-v3", "tekken"))


def _byte_level_bpe(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise InvalidArgumentError(
            "tokenizer",
            f"{source} splits words the way {name!r}, which is not one of those known here "
            f"({known}); {_REMEDY}",
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": _PRE_TOKENIZERS[name],
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _WHOLE_WORDS,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata.get("tokenizer.ggml.merges", []),
        },
    }


# SentencePiece BPE with byte fallback ----------------------------------------------------------


def _sentencepiece(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise InvalidArgumentError(
            "tokenizer", f"{source} has no score for each of its pieces; {_REMEDY}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    from_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "version": "1.0",
        "normalizer": {
            "type": "Sequence",
            "normalizers": [prepend, to_space] if prefix else [to_space],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
            + ([strip] if prefix else []),
        },
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": any(
                _types(metadata)[i] == _TokenType.BYTE for i in range(len(tokens))
            ),
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges_from_scores(tokens, scores, vocab, _types(metadata)),
        },
    }


def _merges_from_scores(
    tokens: list[str], scores: list[float], vocab: dict[str, int], types: list[int]
) -> list[list[str]]:
    """The likelier piece merges first. Only pieces that text can become take part."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in (_TokenType.NORMAL, _TokenType.USER_DEFINED):
            continue
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for _, _, _, left, right in merges]


# What both kinds share -------------------------------------------------------------------------


def _types(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return metadata.get("tokenizer.ggml.token_type") or [_TokenType.NORMAL] * len(tokens)


def _added_tokens(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = (_TokenType.CONTROL, _TokenType.USER_DEFINED, _TokenType.UNKNOWN)
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _TokenType.USER_DEFINED,
        }
        for index, (token, kind) in enumerate(
            zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True)
        )
        if kind in added
    ]


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            config[role] = tokens[index]
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    adds_bos = sentencepiece or metadata.get("tokenizer.ggml.pre") in _ADDS_BOS
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return config


def _post_processor(config: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    if bos is None and eos is None:
        return None

    def around(name: str) -> list[dict[str, Any]]:
        type_id = 0 if name == "A" else 1
        before = [{"SpecialToken": {"id": bos, "type_id": type_id}}] if bos is not None else []
        after = [{"SpecialToken": {"id": eos, "type_id": type_id}}] if eos is not None else []
        return [*before, {"Sequence": {"id": name, "type_id": type_id}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in (bos, eos)
            if token is not None
        },
    }


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    prefix = "tokenizer.chat_template."
    for key, template in metadata.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.replace("_", "").replace("-", "").isalnum():
            files[f"additional_chat_templates/{name}.jinja"] = template.encode()
    return files
