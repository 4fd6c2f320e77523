"""Text that comes in pieces is the text of the whole, whatever the ids and wherever they split."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import InvalidArgumentError
from pagewire_frontend.detokenizer import StreamDetokenizer, make_detokenizer
from pagewire_frontend.tokenizer import Tokenizer
from tests.fakes import small_tokenizers
from tests.fakes.yardstick import at_most

FAMILIES = {
    "byte level": small_tokenizers.byte_level(),
    "byte fallback": small_tokenizers.sentencepiece(),
    "unigram": small_tokenizers.unigram(),
    "word pieces": small_tokenizers.wordpiece(),
}
families = pytest.mark.parametrize("tokenizer", FAMILIES.values(), ids=FAMILIES)
of_bytes = pytest.mark.parametrize(
    "tokenizer", [FAMILIES["byte level"], FAMILIES["byte fallback"]], ids=["level", "fallback"]
)


def stream(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    sizes: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (),
    skip_special_tokens: bool = True,
    shown: frozenset[int] = frozenset(),
) -> list[str]:
    """The pieces of text, the last of them what the end releases."""
    detokenizer = make_detokenizer(
        tokenizer, prompt, skip_special_tokens=skip_special_tokens, shown=shown
    )
    pieces, at, rest = [], 0, iter(sizes)
    while at < len(ids):
        size = max(1, next(rest, 1))
        pieces.append(detokenizer.feed(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.finish()]


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)


sizes = st.lists(st.integers(1, 7), max_size=40)


@families
@settings(max_examples=80)
@given(data=st.data(), cuts=sizes, skip=st.booleans())
def test_pieces_of_any_ids_join_to_the_whole_decoded(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    ids = data.draw(token_ids(tokenizer))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, cuts, skip_special_tokens=skip)) == whole


@families
@settings(max_examples=30)
@given(data=st.data(), cuts=sizes)
def test_single_control_tokens_are_shown_where_the_others_are_skipped(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    ids = data.draw(token_ids(tokenizer))
    shown = data.draw(st.sets(st.sampled_from(sorted(tokenizer.special_token_ids))))
    skipped = tokenizer.special_token_ids - shown
    left = [token_id for token_id in ids if token_id not in skipped]
    text = "".join(stream(tokenizer, ids, cuts, shown=frozenset(shown)))
    assert text == "".join(stream(tokenizer, left, skip_special_tokens=not shown))


@of_bytes
@settings(max_examples=80)
@given(text=small_tokenizers.texts(30), cuts=sizes)
def test_the_text_of_encoded_text_is_that_text(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
    assert "".join(stream(tokenizer, ids, cuts)) == text


@of_bytes
@settings(max_examples=60)
@given(text=small_tokenizers.texts(30), data=st.data())
def test_our_decode_equals_the_tokenizers_own_for_valid_text(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text, parse_special_tokens=False)
    special = data.draw(st.sampled_from(sorted(tokenizer.special_token_ids)))
    ids = [*ids, special]
    for skip in (True, False):
        own = tokenizer.hub_tokenizer.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == own


@settings(max_examples=80)
@given(ids=token_ids(FAMILIES["byte level"]))
def test_byte_level_decode_equals_the_tokenizers_own_for_any_ids(ids: list[int]) -> None:
    tokenizer = FAMILIES["byte level"]
    own = tokenizer.hub_tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == own


@settings(max_examples=80)
@given(ids=token_ids(FAMILIES["unigram"]), skip=st.booleans())
def test_unigram_decode_equals_the_tokenizers_own_for_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = FAMILIES["unigram"]
    own = tokenizer.hub_tokenizer.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == own


@families
@settings(max_examples=60)
@given(
    prompt=st.sampled_from(
        ["The capital of France is", "An engine", "many requests at once; each"]
    ),
    text=st.sampled_from([" Paris. It lies", "don't you think?", " its tokens", "12345 67890"]),
    cuts=sizes,
)
def test_text_after_a_prompt_is_what_the_whole_has_beyond_the_prompt(
    tokenizer: Tokenizer, prompt: str, text: str, cuts: list[int]
) -> None:
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode([*prompt_ids, *ids])
    beyond = whole.removeprefix(tokenizer.decode(prompt_ids))
    assert "".join(stream(tokenizer, ids, cuts, prompt=prompt_ids)) == beyond


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One byte token a byte."""
    if tokenizer is FAMILIES["byte fallback"]:
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
    else:
        by_bytes = {tokenizer.token_bytes_of(i): i for i in range(3, tokenizer.vocab_size)}
        ids = [by_bytes[bytes([byte])] for byte in data]
    assert None not in ids
    return [i for i in ids if i is not None]


@of_bytes
def test_a_prompt_that_ends_within_an_emoji_is_never_emitted(tokenizer: Tokenizer) -> None:
    emoji = byte_ids(tokenizer, "🙂".encode())
    prompt = [*tokenizer.encode("Hello"), *emoji[:2]]
    after = tokenizer.encode("Paris", add_special_tokens=False)
    text = "".join(stream(tokenizer, [*emoji[2:], *after], prompt=prompt))
    assert text.strip() == "Paris"
    # The character is not completed: what follows it is whole all the same.
    assert "".join(stream(tokenizer, after, prompt=prompt)).strip() == "Paris"


@of_bytes
def test_bad_bytes_become_replacement_characters_and_nothing_else_does(
    tokenizer: Tokenizer,
) -> None:
    good = byte_ids(tokenizer, "你".encode())
    bad = byte_ids(tokenizer, b"\xff")
    word = byte_ids(tokenizer, b"ok")
    assert "".join(stream(tokenizer, [*good, *bad, *good, *word])) == "你\ufffd你ok"
    assert "".join(stream(tokenizer, [*good[:2], *word])) == "\ufffdok"
    assert tokenizer.decode([*good, *bad, *good]) == "你\ufffd你"


@of_bytes
def test_half_a_character_held_back_is_neither_repeated_nor_lost(tokenizer: Tokenizer) -> None:
    pieces = byte_ids(tokenizer, "A 世界".encode())
    ids = [*pieces[:-1], *byte_ids(tokenizer, b"ab")]
    assert "".join(stream(tokenizer, ids)) == "A 世\ufffdab"


@of_bytes
def test_output_that_ends_within_a_character_equals_the_full_decode(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "é 🙂".encode())[:-1]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "é \ufffd"
    assert pieces[-1] == "\ufffd"


def test_the_space_after_a_full_stop_survives_streaming() -> None:
    tokenizer = FAMILIES["byte fallback"]
    text = "An engine for LLMs. It serves"
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text


def test_sentencepiece_drops_the_prefix_space_of_a_text_and_keeps_that_of_a_continuation() -> None:
    tokenizer = FAMILIES["byte fallback"]
    ids = tokenizer.encode("Paris", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == "Paris"
    assert "".join(stream(tokenizer, ids, prompt=[small_tokenizers.BOS])) == "Paris"
    prompt = tokenizer.encode("France is")
    assert "".join(stream(tokenizer, ids, prompt=prompt)) == " Paris"


@families
def test_ids_without_a_token_have_no_text_and_change_no_other(tokenizer: Tokenizer) -> None:
    """vllm#21951: a padded vocabulary has ids that the tokenizer lacks, and a model can sample
    them."""
    ids = tokenizer.encode("hello one of them 🙂", add_special_tokens=False)
    text = tokenizer.decode(ids)
    assert text
    for missing in (tokenizer.vocab_size + 5, 2**32 - 1, 2**40, -1):
        padded = [missing, *(i for known in ids for i in (known, missing))]
        assert "".join(stream(tokenizer, padded)) == text
        assert "".join(stream(tokenizer, padded, [7])) == text
        assert tokenizer.decode(padded) == text
        assert tokenizer.token_bytes_of(missing) == b""
        assert stream(tokenizer, ids, prompt=[missing]) == stream(tokenizer, ids)


@families
def test_an_id_without_a_token_has_no_spelling(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match=str(tokenizer.vocab_size + 5)):
        tokenizer.token(tokenizer.vocab_size + 5)


def test_control_tokens_are_left_out_or_kept() -> None:
    tokenizer = FAMILIES["byte level"]
    ids = [*tokenizer.encode("ok"), 2]
    assert "".join(stream(tokenizer, ids)) == "ok"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "ok<|im_end|>"


def test_endless_bad_bytes_cost_the_same_at_the_end_as_at_the_start() -> None:
    """DecodeStream decodes all it holds back at each step: minutes for these."""
    tokenizer = FAMILIES["byte fallback"]
    bad = byte_ids(tokenizer, b"\xf0") * 50_000
    started = time.thread_time()
    text = "".join(stream(tokenizer, bad))
    assert text == "\ufffd" * 50_000
    assert time.thread_time() - started < at_most(4.0)


def test_other_tokenizers_go_through_decode_stream() -> None:
    tokenizer = FAMILIES["word pieces"]
    detokenizer = make_detokenizer(tokenizer, (), skip_special_tokens=True)
    assert isinstance(detokenizer, StreamDetokenizer)
