"""Small tokenizers of each family, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

from pagewire_engine.gguf_tokenizer import tokenizer_files_from_gguf
from pagewire_frontend.tokenizer import Tokenizer as PagewireTokenizer

CORPUS = [
    "The capital of France is Paris. It lies on the Seine, and 2 million people live there.",
    "An engine for LLMs. It serves many requests at once; each is its prompt plus its tokens.",
    "Emoji 🙂😀🎉 and 世界 and ünïcödé text, don't you think? Yes, I do! 12345 67890",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))\n",
] * 4

BOS, EOS, UNK = 1, 2, 0


def texts(max_size: int) -> st.SearchStrategy[str]:
    """Any text but SentencePiece's own spelling of a space, which it can't tell from one."""
    return st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=max_size)


def byte_level_json() -> bytes:
    """GPT-2's kind: control tokens <|endoftext|>, <|im_start|>, <|im_end|> are 0, 1, 2, <think> is
    an added token that is no control token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer.to_str().encode()


def byte_level_files(chat_template: str | None = None) -> dict[str, bytes]:
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return _files(byte_level_json(), config, chat_template)


def sentencepiece_metadata() -> dict[str, Any]:
    """A GGUF file's vocabulary of Llama 2's kind: byte tokens, scores, a space before the text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = BpeTrainer(vocab_size=300, show_progress=False, limit_alphabet=60)
    tokenizer.train_from_iterator([line for line in CORPUS if "🙂" not in line], trainer)
    vocab = tokenizer.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(n) for n in range(len(pieces))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.unknown_token_id": UNK,
    }


def sentencepiece_files(chat_template: str | None = None) -> dict[str, bytes]:
    files = tokenizer_files_from_gguf(sentencepiece_metadata(), source="test")
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return files


def unigram_json() -> bytes:
    """T5's kind; the pieces <s> and </s> are in the model's own vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=["<", ">", "/", "s"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = post.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str().encode()


def wordpiece_json() -> bytes:
    """BERT's kind, whose decoder joins words in its own way."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str().encode()


@cache
def byte_level() -> PagewireTokenizer:
    return PagewireTokenizer.from_files(byte_level_files())


@cache
def sentencepiece() -> PagewireTokenizer:
    return PagewireTokenizer.from_files(sentencepiece_files())


@cache
def unigram() -> PagewireTokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PagewireTokenizer(unigram_json(), config)


@cache
def wordpiece() -> PagewireTokenizer:
    return PagewireTokenizer(wordpiece_json(), {})


def _files(
    tokenizer_json: bytes, config: dict[str, Any], chat_template: str | None
) -> dict[str, bytes]:
    files = {
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return files
