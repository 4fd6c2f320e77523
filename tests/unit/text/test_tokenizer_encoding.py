"""Text to ids: control tokens parsed or plain, and BOS exactly once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_frontend.tokenizer import Tokenizer
from tests.fakes import small_tokenizers

FAMILIES = {
    "byte level": small_tokenizers.byte_level(),
    "byte fallback": small_tokenizers.sentencepiece(),
    "unigram": small_tokenizers.unigram(),
}
families = pytest.mark.parametrize("tokenizer", FAMILIES.values(), ids=FAMILIES)
with_byte_tokens = pytest.mark.parametrize(
    "tokenizer", [FAMILIES["byte level"], FAMILIES["byte fallback"]], ids=["level", "fallback"]
)


def control_texts(tokenizer: Tokenizer) -> list[str]:
    texts = [tokenizer.special_token_text(i) for i in tokenizer.special_token_ids]
    return [text for text in texts if text]


@families
@settings(max_examples=60)
@given(data=st.data())
def test_plain_mode_makes_no_control_token_of_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    words = st.sampled_from([*control_texts(tokenizer), "a", " ", "\n", "word", "<", "|>", "s>"])
    text = "".join(data.draw(st.lists(words, max_size=8)))
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
    unknown = tokenizer.token_id("<unk>")  # what a Unigram model has no piece for
    assert not tokenizer.special_token_ids - {unknown} & set(ids)


@with_byte_tokens
@settings(max_examples=80)
@given(data=st.data())
def test_plain_mode_keeps_every_character(tokenizer: Tokenizer, data: st.DataObject) -> None:
    words = st.one_of(st.sampled_from(control_texts(tokenizer)), small_tokenizers.texts(5))
    text = "".join(data.draw(st.lists(words, max_size=8)))
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@families
@settings(max_examples=60)
@given(text=st.sampled_from(["a <b> c", "The capital", " x", "", "12 34\n"]))
def test_plain_mode_equals_parsing_for_text_without_control_tokens(
    tokenizer: Tokenizer, text: str
) -> None:
    for add in (True, False):
        assert tokenizer.encode(
            text, add_special_tokens=add, parse_special_tokens=False
        ) == tokenizer.encode(text, add_special_tokens=add)


@families
def test_marked_control_tokens_are_parsed_and_the_others_are_not(tokenizer: Tokenizer) -> None:
    control = tokenizer.special_tokens["eos_token"]
    text = f"Hello {control}there{control} you"
    first = text.index(control)
    ids = tokenizer.encode_marked(text, [(first, first + len(control))])
    assert ids.count(tokenizer.eos_token_id) == 1
    both = [
        (first, first + len(control)),
        (text.rindex(control), text.rindex(control) + len(control)),
    ]
    assert tokenizer.encode_marked(text, both) == tokenizer.encode(text, add_special_tokens=False)


def test_white_space_around_a_control_token_is_stripped_only_where_it_is_parsed() -> None:
    files = small_tokenizers.byte_level_files()
    files["tokenizer.json"] = files["tokenizer.json"].replace(
        b'"content":"<|im_end|>","single_word":false,"lstrip":false,"rstrip":false',
        b'"content":"<|im_end|>","single_word":false,"lstrip":true,"rstrip":true',
    )
    tokenizer = Tokenizer.from_files(files)
    text = "a <|im_end|> b"
    parsed = tokenizer.encode(text)
    assert tokenizer.decode(parsed, skip_special_tokens=False) == "a<|im_end|>b"
    assert tokenizer.encode_marked(text, [(2, 12)]) == parsed
    plain = tokenizer.encode(text, parse_special_tokens=False)
    assert tokenizer.decode(plain, skip_special_tokens=False) == text


def test_a_text_that_begins_with_the_bos_gets_one() -> None:
    tokenizer = FAMILIES["byte fallback"]
    bos = small_tokenizers.BOS
    assert tokenizer.encode("Hello")[0] == bos
    assert tokenizer.encode("<s>Hello").count(bos) == 1
    assert tokenizer.encode("<s>Hello", add_special_tokens=False).count(bos) == 1


def test_bytes_of_tokens_are_the_real_ones() -> None:
    level, fallback = FAMILIES["byte level"], FAMILIES["byte fallback"]
    ids = level.encode("🙂")
    assert b"".join(level.token_bytes_of(i) for i in ids) == "🙂".encode()
    assert fallback.token_bytes_of(3 + 0xE4) == b"\xe4"
    assert fallback.token_text(3 + 0xE4) == "\ufffd"
    words = fallback.encode("one of them", add_special_tokens=False)
    assert b"".join(fallback.token_bytes_of(i) for i in words) == b" one of them"
    assert level.token_bytes_of(2) == b"<|im_end|>"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="not valid Unicode at character 1"):
        FAMILIES["byte level"].encode("a\ud800")


def test_an_unreadable_tokenizer_says_which_file_and_what_to_do() -> None:
    with pytest.raises(FailedPreconditionError, match=r"tokenizer\.json.*--tokenizer"):
        Tokenizer(b"{not json")


def test_encoding_a_long_text_lets_other_threads_run() -> None:
    tokenizer = FAMILIES["byte level"]
    started, done = threading.Event(), threading.Event()
    ticks = 0

    def watch() -> None:
        nonlocal ticks
        started.set()
        while not done.wait(0.005):
            ticks += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    started.wait()
    tokenizer.encode("some text that goes on and on. " * 20_000)
    while_encoding = ticks
    done.set()
    watcher.join()
    assert while_encoding > 3
