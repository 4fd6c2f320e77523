"""Masks of many sequences: on how many threads they are made, and whose take long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagewire.structured_output import StructuredOutput
from pagewire_engine import mask_filler
from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.mask_filler import MaskFiller
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.token_bytes import numbers_of
from tests.fakes.fake_engine_client import byte_tokenizer, ids_of

EOS, VOCAB_SIZE = 258, 259


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode()}
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many masks each call made that several threads shared."""
    counts: list[int] = []
    fill = MaskFiller._fill_shared

    def counted(self: MaskFiller, matchers: Any, *rest: Any) -> None:
        counts.append(len(matchers))
        fill(self, matchers, *rest)

    monkeypatch.setattr(MaskFiller, "_fill_shared", counted)
    return counts


def filled(filler: MaskFiller, matchers: list[Matcher]) -> list[list[int]]:
    """The tokens that each allows."""
    bits = np.full((len(matchers), 9), 0xFFFFFFFF, np.uint32)
    filler.fill(matchers, bits, bits.ctypes.data)
    return [numbers_of(row) for row in bits]


def matchers_of(compiler: GrammarCompiler, *regexes: str) -> list[Matcher]:
    return [compiler.matcher(StructuredOutput(regex=regex)) for regex in regexes]


@pytest.mark.parametrize("num_rows", [2, 9])
def test_an_ambiguous_grammar_is_refused_once_it_has_held_others_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    monkeypatch.setattr(mask_filler, "SLOW_MASK_S", -1.0)
    together, filler = matchers_of(compiler, *["a*"] * num_rows), MaskFiller(4)
    for _ in range(20):
        filled(filler, together)
    assert "ambiguous" in (together[-1].fault() or "")


def test_a_long_text_is_not_said_to_be_ambiguous_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice is never ambiguous: its masks take long where its texts are long."""
    monkeypatch.setattr(mask_filler, "SLOW_MASK_S", -1.0)
    matcher = compiler.matcher(StructuredOutput(choice=("x" * 1000,)))
    for _ in range(20):
        filled(MaskFiller(1), [matcher])
    assert "its texts are too long" in (matcher.fault() or "")


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def taking(compute: Callable[[], None], restrict: Callable[[], None] = lambda: None) -> Any:
    """A matcher whose masks take a while."""
    return SimpleNamespace(
        inner=SimpleNamespace(unsafe_compute_mask_ptr=lambda *_: compute()),
        is_free=False,
        only_token=lambda: None,
        restrict=lambda _: restrict(),
        num_slow_masks=0,
    )


def test_what_a_mask_needs_beside_the_grammar_counts_too() -> None:
    matchers = [taking(lambda: None), taking(lambda: None, lambda: busy(0.03))]
    filled(MaskFiller(1), matchers)
    assert [each.num_slow_masks for each in matchers] == [0, 1]


def test_time_in_which_others_had_the_cpu_is_not_counted() -> None:
    matchers = [
        taking(lambda: time.sleep(0.03)),
        taking(lambda: busy(0.03)),
        taking(lambda: busy(0.001)),
        taking(lambda: time.sleep(0.03)),
        taking(lambda: busy(0.03)),
    ]
    filled(MaskFiller(1), matchers)
    assert [each.num_slow_masks for each in matchers] == [0, 1, 0, 0, 1]


def test_masks_of_many_rows_are_made_by_one_call_until_one_is_slow(
    compiler: GrammarCompiler, shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    filler, matchers = MaskFiller(4), matchers_of(compiler, *"abcdefgh")
    assert filled(filler, matchers) == [ids_of(text) for text in "abcdefgh"]
    assert filled(filler, matchers[:7]) == [ids_of(text) for text in "abcdefg"]
    assert shared == [8]
    with monkeypatch.context() as slow:
        slow.setattr(mask_filler, "SLOW_MASK_S", -1.0)
        filled(filler, matchers)
    assert shared == [8, 8]
    # Each by itself, to see which of them it was.
    assert filled(filler, matchers) == [ids_of(text) for text in "abcdefgh"]
    assert shared == [8, 8]
    filled(filler, matchers)
    assert shared == [8, 8, 8]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_two_threads_make_masks_no_sooner_than_one(
    compiler: GrammarCompiler, shared: list[int], num_threads: int
) -> None:
    filled(MaskFiller(num_threads), matchers_of(compiler, *["a"] * 20))
    assert not shared


@pytest.mark.parametrize("num_threads", [1, 4])
def test_of_what_has_to_come_no_mask_is_made(
    compiler: GrammarCompiler, shared: list[int], num_threads: int
) -> None:
    """Near the end only the way there is left: it is known without the grammar."""
    held = compiler.matcher(StructuredOutput(json_schema='{"type": "string"}'), 40)
    held.advance(ids_of('"'))
    while len(allowed := filled(MaskFiller(1), [held])[0]) > 1:
        held.advance([min(set(allowed) - {EOS}, key=lambda token: abs(token - ord("a")))])
    free = matchers_of(compiler, *"abcdefgh")
    assert filled(MaskFiller(num_threads), [*free, held]) == [*map(ids_of, "abcdefgh"), allowed]
    assert shared == ([8] if num_threads == 4 else [])
    held.advance(allowed)
    assert filled(MaskFiller(num_threads), [held]) == [[EOS]]
