"""Masks of many sequences, and whose take long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagewire.structured_output import StructuredOutput
from pagewire_engine import mask_filling
from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.mask_filling import fill_masks
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


def filled(matchers: Sequence[Any]) -> list[list[int]]:
    """The tokens that each allows."""
    bits = np.full((len(matchers), 9), 0xFFFFFFFF, np.uint32)
    fill_masks(matchers, bits, bits.ctypes.data)
    return [numbers_of(row) for row in bits]


def matchers_of(compiler: GrammarCompiler, *regexes: str) -> list[Matcher]:
    return [compiler.matcher(StructuredOutput(regex=regex)) for regex in regexes]


def test_an_ambiguous_grammar_is_refused_once_it_has_held_others_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_filling, "_SLOW_MASK_S", -1.0)
    together = matchers_of(compiler, "a*", "a*")
    for _ in range(20):
        filled(together)
    assert "ambiguous" in (together[-1].fault() or "")


def test_a_long_text_is_not_said_to_be_ambiguous_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice is never ambiguous: its masks take long where its texts are long."""
    monkeypatch.setattr(mask_filling, "_SLOW_MASK_S", -1.0)
    matcher = compiler.matcher(StructuredOutput(choice=("x" * 1000,)))
    for _ in range(20):
        filled([matcher])
    assert "its texts are too long" in (matcher.fault() or "")


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Taking:
    """A matcher whose masks take a while."""

    is_free = False

    def __init__(
        self, compute: Callable[[], None], restrict: Callable[[], None] = lambda: None
    ) -> None:
        self.inner = SimpleNamespace(unsafe_compute_mask_ptr=lambda *_: compute())
        self.restrict = lambda _: restrict()
        self.num_slow_masks = 0

    def only_token(self) -> None:
        return None

    def notice_slow_mask(self) -> None:
        self.num_slow_masks += 1


def slow_masks(matchers: list[Taking]) -> list[int]:
    """How many slow masks each is told of in one step."""
    filled(matchers)
    return [each.num_slow_masks for each in matchers]


def test_what_a_mask_needs_beside_the_grammar_counts_too() -> None:
    matchers = [Taking(lambda: None), Taking(lambda: None, lambda: busy(0.03))]
    assert slow_masks(matchers) == [0, 1]


def test_time_in_which_others_had_the_cpu_is_not_counted() -> None:
    matchers = [
        Taking(lambda: time.sleep(0.03)),
        Taking(lambda: busy(0.03)),
        Taking(lambda: busy(0.001)),
        Taking(lambda: time.sleep(0.03)),
        Taking(lambda: busy(0.03)),
    ]
    assert slow_masks(matchers) == [0, 1, 0, 0, 1]


class WithoutMasks:
    """llguidance's matcher, that no mask may be asked of."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        assert "mask" not in name
        return getattr(self._inner, name)


def test_of_what_has_to_come_no_mask_is_made(compiler: GrammarCompiler) -> None:
    """Near the end only the way there is left: it is known without the grammar."""
    held = compiler.matcher(StructuredOutput(json_schema='{"type": "string"}'), 40)
    held.advance(ids_of('"'))
    while len(allowed := filled([held])[0]) > 1:
        held.advance([min(set(allowed) - {EOS}, key=lambda token: abs(token - ord("a")))])
    assert allowed == ids_of('"')
    held.inner = WithoutMasks(held.inner)
    free = matchers_of(compiler, *"ab")
    assert filled([*free, held, *free]) == [ids_of(text) for text in ("a", "b", '"', "a", "b")]
