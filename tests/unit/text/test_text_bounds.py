"""A text that can't fit is refused by its length, and none that fits."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_frontend.errors import TooManyTokensError
from pagewire_frontend.text_bounds import TextBound
from pagewire_frontend.tokenizer import Tokenizer
from tests.fakes import small_tokenizers
from tests.fakes.yardstick import at_most

BYTE_LEVEL = small_tokenizers.byte_level()
BYTE_FALLBACK = small_tokenizers.sentencepiece()
bounded = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"]
)


def content_of(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.hub_tokenizer.to_str())
    return content


@bounded
@settings(max_examples=150)
@given(text=st.text(max_size=300) | st.text("ab é한 \u1112\u1161\u11ab", max_size=300))
def test_the_bound_is_never_above_the_tokens_there_are(tokenizer: Tokenizer, text: str) -> None:
    bound = TextBound.of(content_of(tokenizer))
    assert bound is not None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert bound.min_tokens(text, 0) <= num_tokens
    tokenizer.encode(text, add_special_tokens=False, max_tokens=num_tokens)
    if num_tokens:
        with pytest.raises(TooManyTokensError):
            tokenizer.encode(text, add_special_tokens=False, max_tokens=num_tokens - 1)


@bounded
def test_a_text_of_many_megabytes_is_refused_without_being_tokenised(tokenizer: Tokenizer) -> None:
    text = "the longest text. " * 1_000_000
    for encode in (tokenizer.encode, lambda t, **kw: tokenizer.encode_marked(t, (), **kw)):
        started = time.thread_time()
        with pytest.raises(TooManyTokensError) as raised:
            encode(text, max_tokens=1000)
        assert time.thread_time() - started < at_most(2.0)  # half a minute to tokenise it
        assert not raised.value.exact
        assert "at least" in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        },
    ],
)
def test_what_drops_text_has_no_bound(change: dict[str, Any]) -> None:
    assert TextBound.of(content_of(BYTE_LEVEL) | change) is None


@pytest.mark.parametrize("tokenizer", [small_tokenizers.unigram(), small_tokenizers.wordpiece()])
def test_unknown_words_of_any_length_have_no_bound(tokenizer: Tokenizer) -> None:
    assert TextBound.of(content_of(tokenizer)) is None
    assert len(tokenizer.encode("☃" * 5000, max_tokens=10)) <= 10


def test_composition_is_allowed_for() -> None:
    content = content_of(BYTE_LEVEL) | {"normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer(json.dumps(content).encode())
    text = "\u1112\u1161\u11ab" * 400  # nine bytes, composed to three
    num_tokens = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, max_tokens=num_tokens)) == num_tokens


def test_white_space_that_a_token_swallows_does_not_count() -> None:
    content = content_of(BYTE_LEVEL)
    content["added_tokens"][0] |= {"lstrip": True, "rstrip": True}
    tokenizer = Tokenizer(json.dumps(content).encode())
    text = " " * 100_000 + content["added_tokens"][0]["content"] + "\n" * 100_000
    assert len(tokenizer.encode(text, max_tokens=5)) == 1
