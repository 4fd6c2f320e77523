"""The best n of a request's candidates, by cumulative log probability."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason, PositionLogprobs, TokenLogprob
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.best_of import BestOf
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta
from pagewire_frontend.finished import FinishedGeneration
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.generation_types import (
    GenerationRequest,
    GenerationUpdate,
    PositionTextLogprobs,
    TextDelta,
    TextLogprob,
)
from tests.fakes import small_tokenizers
from tests.fakes.replaying_client import ReplayingClient

TOKENIZER = small_tokenizers.byte_level()
FILES = small_tokenizers.byte_level_files("{{ messages[0].content }}")


def turns_of(answers: list[tuple[str, float]]) -> list[list[TokenDelta]]:
    """Each answer token by token, every token with its log probability; side by side."""
    turns: list[list[TokenDelta]] = []
    for index, (text, logprob) in enumerate(answers):
        ids = TOKENIZER.encode(text)
        for n, token_id in enumerate(ids):
            while len(turns) <= n:
                turns.append([])
            position = PositionLogprobs(TokenLogprob(token_id, logprob, 1), [])
            delta = TokenDelta(index, n, [token_id], [position])
            if n == len(ids) - 1:
                delta.finish_reason = FinishReason.LENGTH
                delta.cumulative_logprob = logprob * len(ids)
            turns[n].append(delta)
    return turns


async def run(
    answers: list[tuple[str, float]], **params: Any
) -> tuple[FinishedGeneration, list[GenerationUpdate], EngineRequest]:
    """The result, the updates it came in, and what the engine was asked."""

    def updates_of(_: EngineRequest) -> list[Any]:
        return turns_of(answers)

    client = ReplayingClient(FILES, updates_of, vocab_size=TOKENIZER.vocab_size)
    path = await Generation.create(client, GenerationSettings())
    request = GenerationRequest(prompt="x", sampling_params=SamplingParams(**params))
    whole = await (await path.start(request)).collect()
    updates = [update async for update in await path.start(request)]
    return whole, updates, client.requests[0]


ANSWERS = [("one answer", -3.0), ("another", -1.0), ("a third one", -2.0)]


async def test_the_likeliest_come_best_first_and_only_at_the_end() -> None:
    whole, updates, asked = await run(ANSWERS, n=2, best_of=3)
    assert [sequence.text for sequence in whole.sequences] == ["another", "a third one"]
    assert [sequence.index for sequence in whole.sequences] == [0, 1]
    expected = -len(TOKENIZER.encode("another"))
    assert whole.sequences[0].cumulative_logprob == pytest.approx(expected)
    assert len(updates) == 1
    assert updates[0].discarded_tokens == len(TOKENIZER.encode("one answer"))
    assert updates[0].times is not None
    assert (asked.sampling_params.n, asked.sampling_params.best_of) == (3, None)


async def test_log_probabilities_are_told_only_where_asked_for() -> None:
    whole, _, asked = await run(ANSWERS, n=1, best_of=3)
    assert asked.sampling_params.logprobs == 0
    assert whole.sequences[0].logprobs == []
    whole, _, asked = await run(ANSWERS, n=1, best_of=3, logprobs=0)
    assert len(whole.sequences[0].logprobs) == len(whole.sequences[0].token_ids)


def test_held_log_probabilities_are_let_go_of_and_tokens_are_not_copied() -> None:
    position = PositionTextLogprobs(TextLogprob(1, -1.0, 1, "a", b"a"), [], 0)
    best_of = BestOf(SamplingParams(n=1, best_of=2))
    kept: list[int] | None = None
    for n in range(1, 4):
        delta = TextDelta(0, "a", [n], [position], num_tokens=n)
        update = GenerationUpdate([delta])
        best_of.hold(update)
        assert update.deltas == []
        held = best_of._candidates[0]
        assert kept is None or held.token_ids is kept
        kept = held.token_ids
        assert held.logprobs == []
        assert delta.token_ids == [n], "it is not ours"
    last = GenerationUpdate([])
    best_of.release(last)
    assert [(d.text, d.token_ids, d.num_tokens) for d in last.deltas] == [("aaa", [1, 2, 3], 3)]


async def test_what_follows_a_stop_string_does_not_count() -> None:
    """The engine would rank by all that it made; the text ends before."""
    answers = [("ab. and much more that is unlikely", -1.0), ("cdefgh. and", -1.0)]
    whole, _, _ = await run(answers, n=1, best_of=2, stop=".")
    assert whole.sequences[0].text == "ab"
    tokens = TOKENIZER.encode("ab.")
    assert whole.sequences[0].token_ids == tokens
    assert whole.sequences[0].cumulative_logprob == pytest.approx(-len(tokens))


async def test_best_of_n_is_n() -> None:
    whole, updates, asked = await run(ANSWERS, n=3, best_of=3)
    assert [sequence.text for sequence in whole.sequences] == [text for text, _ in ANSWERS]
    assert len(updates) > 1, "nothing has to wait for the end"
    assert asked.sampling_params.logprobs is None


async def test_an_error_about_the_candidates_names_best_of() -> None:
    refusal = InvalidArgumentError("n", "more than the engine runs at a time")
    client = ReplayingClient(FILES, lambda _: [refusal], vocab_size=TOKENIZER.vocab_size)
    path = await Generation.create(client, GenerationSettings())
    params = SamplingParams(n=1, best_of=9)
    running = await path.start(GenerationRequest(prompt="x", sampling_params=params))
    with pytest.raises(InvalidArgumentError) as caught:
        await running.collect()
    assert caught.value.field == "best_of"


@settings(max_examples=50)
@given(
    logprobs=st.lists(
        st.floats(-50, 0, allow_nan=False).map(lambda value: round(value, 3)),
        min_size=2,
        max_size=8,
    ),
    data=st.data(),
)
def test_nothing_better_is_left_out(logprobs: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(logprobs)))
    answers = [(f"answer {number}", value) for number, value in enumerate(logprobs)]
    whole, _, _ = asyncio.run(run(answers, n=n, best_of=len(answers), logprobs=0))
    chosen = [sequence.cumulative_logprob for sequence in whole.sequences]
    assert len(chosen) == n
    if n < len(logprobs):
        sums = [len(TOKENIZER.encode(text)) * value for text, value in answers]
        expected = sorted(sums, reverse=True)[:n]
        assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(chosen, expected, strict=True))
