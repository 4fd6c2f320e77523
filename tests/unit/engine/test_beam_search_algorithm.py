"""The search itself, on a model of a few tokens, against the enumeration of all sequences and
against a plain rendering of the algorithm."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.beam_search_params import BeamSettings
from pagewire.outputs import FinishReason, PositionLogprobs
from pagewire_engine.beam_search import BeamSearch, Hypothesis
from pagewire_engine.step import Candidates

EOS = 0


@dataclass
class Path:
    """A beam."""

    output_token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class TinyModel:
    """Log probabilities that depend on the whole past, the same in every run."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size

    def logprobs(self, past: list[int]) -> list[float]:
        draw = random.Random(f"{self.seed}:{past}")
        logits = [draw.gauss(0.0, 2.0) for _ in range(self.vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    def candidates(self, past: list[int]) -> Candidates:
        logprobs = self.logprobs(past)
        order = sorted(range(self.vocab_size), key=lambda token_id: -logprobs[token_id])
        return Candidates(0, order, [logprobs[token_id] for token_id in order])


class Model(Protocol):
    """What continues a past."""

    def candidates(self, past: list[int]) -> Candidates: ...


def search(
    model: Model,
    settings: BeamSettings,
    max_tokens: int,
    *,
    eos: tuple[int, ...] = (EOS,),
    num_logprobs: int | None = None,
) -> list[Hypothesis]:
    """Runs a search as the engine does."""
    beam_search = BeamSearch(settings, max_tokens, eos, num_logprobs)
    beams = [Path()]
    while not beam_search.done:
        assert beam_search.length < max_tokens
        candidates = [model.candidates(beam.output_token_ids) for beam in beams]
        going_on = beam_search.advance(beams, candidates)
        assert len(going_on) <= settings.beam_width
        beams = [
            Path(
                [*beams[each.beam].output_token_ids, each.token_id],
                each.cumulative_logprob,
                beams[each.beam].logprobs + ([each.logprobs] if each.logprobs else []),
            )
            for each in going_on
        ]
        assert all(len(beam.output_token_ids) == beam_search.length for beam in beams)
    return beam_search.hypotheses


def every_sequence(
    model: TinyModel, max_tokens: int, length_penalty: float
) -> list[tuple[float, list[int]]]:
    """All sequences that end at EOS or at max_tokens, best score first."""
    scored = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(model.vocab_size), repeat=length):
            ended = tokens[-1] == EOS or length == max_tokens
            if EOS in tokens[:-1] or not ended:
                continue
            total = sum(model.logprobs(list(tokens[:n]))[tokens[n]] for n in range(length))
            scored.append((total / length**length_penalty, list(tokens)))
    return sorted(scored, reverse=True)


@given(
    seed=st.integers(0, 10_000),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    max_tokens=st.integers(1, 4),
)
def test_a_search_as_wide_as_all_there_is_finds_the_best_of_all(
    seed: int, length_penalty: float, max_tokens: int
) -> None:
    model = TinyModel(seed, vocab_size=4)
    settings = BeamSettings(beam_width=128, length_penalty=length_penalty, early_stopping="never")
    found = search(model, settings, max_tokens)
    expected = every_sequence(model, max_tokens, length_penalty)[: len(found)]
    assert [each.token_ids for each in found] == [tokens for _, tokens in expected]
    for hypothesis, (score, _) in zip(found, expected, strict=True):
        assert hypothesis.score == pytest.approx(score)
        assert hypothesis.cumulative_logprob == pytest.approx(
            score * len(hypothesis.token_ids) ** length_penalty
        )


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    length_penalty=st.sampled_from([-0.5, 0.0, 1.0, 1.5]),
    early_stopping=st.sampled_from([True, False, "never"]),
    max_tokens=st.integers(1, 12),
    eos=st.sampled_from([(), (0,), (0, 3)]),
)
def test_what_every_search_keeps_to(
    seed: int,
    width: int,
    length_penalty: float,
    early_stopping: Any,
    max_tokens: int,
    eos: tuple[int, ...],
) -> None:
    model = TinyModel(seed, vocab_size=12)
    settings = BeamSettings(
        beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping
    )
    found = search(model, settings, max_tokens, eos=eos, num_logprobs=2)
    assert len(found) == width, "as many results as beams, always"
    assert len({tuple(each.token_ids) for each in found}) == width, "no result comes twice"
    assert [each.score for each in found] == sorted((e.score for e in found), reverse=True)
    for each in found:
        tokens = each.token_ids
        by_hand = sum(model.logprobs(tokens[:n])[tokens[n]] for n in range(len(tokens)))
        assert each.cumulative_logprob == pytest.approx(by_hand)
        assert not set(tokens[:-1]) & set(eos), "nothing follows an end of sequence"
        assert (each.finish_reason is FinishReason.STOP) == (tokens[-1] in eos)
        assert len(tokens) == max_tokens or each.finish_reason is FinishReason.STOP
        assert [position.token.token_id for position in each.logprobs] == tokens
        assert all(len(position.top) == 2 for position in each.logprobs)
        for position in each.logprobs:
            own = position.token
            assert own.rank > 2 or position.top[own.rank - 1] == own


def test_one_beam_without_a_penalty_is_greedy() -> None:
    for seed in range(50):
        model = TinyModel(seed, vocab_size=9)
        greedy: list[int] = []
        while len(greedy) < 8:
            greedy.append(model.candidates(greedy).token_ids[0])
        [found] = search(model, BeamSettings(beam_width=1), 8, eos=())
        assert found.token_ids == greedy


class Scripted:
    """A model whose candidates after each past are written down; other pasts are unlikely."""

    def __init__(self, script: dict[tuple[int, ...], dict[int, float]], vocab_size: int) -> None:
        self._script = script
        self.vocab_size = vocab_size

    def candidates(self, past: list[int]) -> Candidates:
        given_here = self._script.get(tuple(past), {})
        rest = {token_id: -50.0 - token_id for token_id in range(self.vocab_size)}
        ranked = sorted((rest | given_here).items(), key=lambda entry: -entry[1])
        return Candidates(0, [key for key, _ in ranked], [value for _, value in ranked])


# After 5 the search may end at once with a mean of -1; going on costs little more each step, so
# that a longer sequence has the better mean.
LONGER_IS_BETTER = Scripted(
    {
        (): {5: -0.5, 6: -0.6},
        (5,): {EOS: -1.5, 7: -1.4},
        (6,): {EOS: -1.6, 7: -1.7},
        (5, 7): {8: -0.1},
        (5, 7, 8): {8: -0.1},
        (5, 7, 8, 8): {EOS: -0.1},
    },
    vocab_size=10,
)


@pytest.mark.parametrize(
    ("early_stopping", "best"),
    [(True, [5, EOS]), ("never", [5, 7, 8, 8, EOS])],
)
def test_when_a_search_stops(early_stopping: Any, best: list[int]) -> None:
    settings = BeamSettings(beam_width=2, early_stopping=early_stopping)
    found = search(LONGER_IS_BETTER, settings, 6)
    assert found[0].token_ids == best


def test_the_length_penalty_decides_between_short_and_long() -> None:
    def best(length_penalty: float) -> list[int]:
        settings = BeamSettings(beam_width=2, length_penalty=length_penalty, early_stopping="never")
        return search(LONGER_IS_BETTER, settings, 6)[0].token_ids

    assert best(-1.0) == [5, EOS]
    assert best(1.0) == [5, 7, 8, 8, EOS]


def test_what_ends_below_the_first_beams_is_no_result() -> None:
    """Hugging Face's rule: only ends that rank among the first `beam_width` count."""
    model = Scripted({(): {5: -0.1, 6: -0.2, EOS: -0.3}, (5,): {EOS: -9.0, 7: -1.0}}, 10)
    found = search(model, BeamSettings(beam_width=2), 2)
    assert [EOS] not in [each.token_ids for each in found]
