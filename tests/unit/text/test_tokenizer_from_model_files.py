"""Tokenizers out of model folders and GGUF files equal those they stand for."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

from pagewire.errors import InvalidArgumentError
from pagewire_engine.gguf_metadata import read_gguf_metadata
from pagewire_engine.gguf_tokenizer import tokenizer_files_from_gguf
from pagewire_engine.tokenizer_files import load_tokenizer_files
from pagewire_frontend.tokenizer import Tokenizer
from tests.fakes import small_tokenizers

SAMPLES = [
    "Hello 12345, it's 7 o'clock!",
    "  leading and trailing  ",
    "tabs\tand\n\nnew lines\r\n",
    "naïve café 你好 🙂",
    "DON'T shout; 3.14159",
    "",
]


def test_a_folders_files_are_passed_on_as_they_are(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": small_tokenizers.byte_level_json(),
        "tokenizer_config.json": b'{"bos_token": "<|im_start|>"}',
        "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/rag.jinja": b"rag",
        "generation_config.json": b"{}",
    }
    (tmp_path / "additional_chat_templates").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"not a tokenizer's")
    assert load_tokenizer_files(tmp_path, None, mode="auto") == files
    assert load_tokenizer_files(tmp_path, None, mode="fast") == files


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt", "tekken.json"])
def test_slow_files_alone_are_refused_with_the_way_to_convert_them(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InvalidArgumentError, match=f"{name}.*save_pretrained.*--tokenizer"):
        load_tokenizer_files(tmp_path, None, mode="auto")


def test_a_folder_without_any_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--skip-tokenizer-init"):
        load_tokenizer_files(tmp_path, None, mode="auto")
    with pytest.raises(InvalidArgumentError, match="--tokenizer-mode auto"):
        load_tokenizer_files(tmp_path, None, mode="fast")


def write_vocab_and_merges(folder: Path, config: dict[str, Any]) -> HubTokenizer:
    trained = HubTokenizer.from_buffer(small_tokenizers.byte_level_json())
    model = json.loads(trained.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return trained


def test_gpt2s_files_make_the_tokenizer_that_transformers_makes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    write_vocab_and_merges(tmp_path, config)
    reference = transformers.GPT2TokenizerFast.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_files(load_tokenizer_files(tmp_path, None, mode="auto"))
    for text in [*SAMPLES, "a<|endoftext|>b"]:
        assert ours.encode(text) == reference(text)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_opts_files_add_the_bos_that_the_config_asks_for(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|im_end|>"},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    }
    write_vocab_and_merges(tmp_path, config)
    ours = Tokenizer.from_files(load_tokenizer_files(tmp_path, None, mode="auto"))
    assert ours.encode("Hi")[0] == 2
    assert ours.special_token_ids == {0, 2}


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write_vocab_and_merges(tmp_path, {})
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(InvalidArgumentError, match="do not make a tokenizer"):
        load_tokenizer_files(tmp_path, None, mode="auto")


# GGUF --------------------------------------------------------------------------------------------


def byte_level_metadata(pre: str) -> dict[str, Any]:
    trained = json.loads(small_tokenizers.byte_level_json())
    vocab = trained["model"]["vocab"] | {"<think>": len(trained["model"]["vocab"])}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = trained["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 4) + [4],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }


def test_gpt2s_way_equals_the_tokenizer_the_vocabulary_came_from() -> None:
    files = tokenizer_files_from_gguf(byte_level_metadata("gpt-2"), source="test")
    ours, original = Tokenizer.from_files(files), small_tokenizers.byte_level()
    for text in [*SAMPLES, "a<|im_end|>b<think>c"]:
        assert ours.encode(text) == original.encode(text)
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.special_token_ids == {0, 1, 2}
    assert files["chat_template.jinja"] == b"{{ messages }}"
    assert files["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"


WORDS = {
    "smollm": ["Hello", "Ġ", "1", "2", "3", "4", ",", "Ġit", "'s"],
    "gpt-2": ["Hello", "Ġ1234", ",", "Ġit", "'s"],
    "default": ["Hello", "Ġ", "123", "4", ",", "Ġit", "'", "s"],
    "llama-bpe": ["Hello", "Ġ", "123", "4", ",", "Ġit", "'s"],
    "qwen2": ["Hello", "Ġ", "1", "2", "3", "4", ",", "Ġit", "'s"],
    "tekken": ["Hello", "Ġ", "1", "2", "3", "4", ",", "Ġit", "'s"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_each_named_way_splits_words_as_its_models_do(pre: str) -> None:
    files = tokenizer_files_from_gguf(byte_level_metadata(pre), source="test")
    tokenizer = HubTokenizer.from_buffer(files["tokenizer.json"])
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("Hello 1234, it's")]
    assert words == WORDS[pre]


@pytest.mark.parametrize("pre", WORDS)
@settings(max_examples=25)
@given(text=st.text(alphabet=st.sampled_from("aB 1.\n'é你🙂\t"), max_size=20))
def test_every_way_of_splitting_keeps_every_character(pre: str, text: str) -> None:
    files = tokenizer_files_from_gguf(byte_level_metadata(pre), source="test")
    tokenizer = HubTokenizer.from_buffer(files["tokenizer.json"])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(ids) == expected


def test_an_unknown_way_of_splitting_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'mystery'.*smollm.*--tokenizer"):
        tokenizer_files_from_gguf(byte_level_metadata("mystery"), source="x.gguf")
    unnamed = byte_level_metadata("gpt-2")
    del unnamed["tokenizer.ggml.pre"]
    with pytest.raises(InvalidArgumentError, match="None"):
        tokenizer_files_from_gguf(unnamed, source="x.gguf")


def test_an_unknown_kind_of_vocabulary_is_refused() -> None:
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.model": "bert"}
    with pytest.raises(InvalidArgumentError, match="'bert'"):
        tokenizer_files_from_gguf(metadata, source="x.gguf")
    with pytest.raises(InvalidArgumentError, match="no vocabulary"):
        tokenizer_files_from_gguf({}, source="x.gguf")
    scoreless = small_tokenizers.sentencepiece_metadata()
    del scoreless["tokenizer.ggml.scores"]
    with pytest.raises(InvalidArgumentError, match="score"):
        tokenizer_files_from_gguf(scoreless, source="x.gguf")


def llama_cpp_encode(metadata: dict[str, Any], text: str) -> list[str]:
    """llama.cpp's SentencePiece tokenizer: of all neighbours, the pair with the best score merges
    first, the leftmost of equals; what is no piece in the end becomes bytes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    score = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    pieces = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(-score[a + b], n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in score]
        if not pairs:
            break
        _, n = min(pairs)
        pieces[n : n + 2] = [pieces[n] + pieces[n + 1]]
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@settings(max_examples=80)
@given(
    text=st.one_of(
        st.sampled_from(SAMPLES + small_tokenizers.CORPUS[:4]),
        st.text(alphabet=st.sampled_from("the caplo fi. 1é你"), max_size=25),
    )
)
def test_sentencepiece_vocabularies_encode_as_llama_cpp_does(text: str) -> None:
    metadata = small_tokenizers.sentencepiece_metadata()
    ours = small_tokenizers.sentencepiece()
    ids = ours.encode(text, add_special_tokens=False, parse_special_tokens=False)
    assert [ours.token(i) for i in ids] == llama_cpp_encode(metadata, text)


def test_sentencepiece_vocabularies_add_the_bos_unless_told_otherwise() -> None:
    metadata = small_tokenizers.sentencepiece_metadata()
    assert small_tokenizers.sentencepiece().encode("Hi")[0] == small_tokenizers.BOS
    told = metadata | {
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_files(tokenizer_files_from_gguf(told, source="test"))
    ids = tokenizer.encode(" Hi")
    assert small_tokenizers.BOS not in ids
    assert ids[-1] == small_tokenizers.EOS
    assert tokenizer.decode(ids) == " Hi"


# The GGUF head -----------------------------------------------------------------------------------


def gguf_bytes(values: list[tuple[str, int, bytes]]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, kind, data in values:
        head += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + data
    return head


def test_the_head_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    strings = struct.pack("<IQ", 8, 2) + struct.pack("<Q1sQ2s", 1, b"a", 2, "é".encode())
    path.write_bytes(
        gguf_bytes(
            [
                ("number", 4, struct.pack("<I", 7)),
                ("flag", 7, b"\x01"),
                ("text", 8, struct.pack("<Q3s", 3, b"abc")),
                ("floats", 9, struct.pack("<IQ2f", 6, 2, 0.5, -1)),
                ("strings", 9, strings),
            ]
        )
    )
    assert read_gguf_metadata(path) == {
        "number": 7,
        "flag": True,
        "text": "abc",
        "floats": [0.5, -1.0],
        "strings": ["a", "é"],
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGU",
        b"not a GGUF file at all",
        gguf_bytes([("number", 4, b"")]),
        gguf_bytes([("text", 8, struct.pack("<Q", 2**60))]),
        gguf_bytes([("array", 9, struct.pack("<IQ", 4, 2**60))]),
        gguf_bytes([("unknown", 99, b"")]),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    ],
)
def test_a_broken_gguf_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError, match=r"broken\.gguf.*download it again"):
        read_gguf_metadata(path)


def test_smollm2s_digits_are_single_tokens(smollm2_path: Path) -> None:
    """transformers drops the `smollm` way of splitting from a GGUF file."""
    files = load_tokenizer_files(smollm2_path.parent, smollm2_path, mode="auto")
    tokenizer = Tokenizer.from_files(files)
    tokens = [tokenizer.token(i) for i in tokenizer.encode("In 2024, <|im_end|>")]
    assert tokens == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "<|im_end|>"]
    assert tokenizer.vocab_size == 49152
