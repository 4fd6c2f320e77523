"""Reasoning ends with its budget, and the answer goes on from there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import InvalidArgumentError
from pagewire.outputs import FinishReason, PositionLogprobs, TokenLogprob
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta
from pagewire_frontend.finished import FinishedGeneration
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.tool_choice import ToolUse
from tests.fakes.fake_engine_client import VOCAB_SIZE, ids_of, tokenizer_files
from tests.fakes.replaying_client import ReplayingClient, ReplayingStream, turns_of

OPENED = "{{ messages[0].content }}<think>\n{# </think> #}"
UNOPENED = "{{ messages[0].content }}{# </think> #}"
END = "\n</think>\n\n"


def position_of(token_id: int) -> PositionLogprobs:
    """What the engine tells of a token, the same wherever it stands."""
    token = TokenLogprob(token_id, -0.5 - token_id / 1000, 1 + token_id % 7)
    return PositionLogprobs(token, [token])


class Engine(ReplayingClient):
    """Writes `thought`; where a request comes with a past, `answer` after it.

    Args:
        thoughts: of each sequence.
        sizes: of the deltas.
    """

    def __init__(self, thoughts: list[str], answer: str, sizes: list[int], template: str) -> None:
        self._thoughts, self._answer_text, self._sizes = thoughts, answer, sizes
        super().__init__(
            tokenizer_files(template), self._turns, vocab_size=VOCAB_SIZE, max_model_len=1000
        )

    def _turns(self, request: EngineRequest) -> list[list[TokenDelta] | Exception]:
        by_sequence = []
        for index, thought in enumerate(self._thoughts):
            ids, start = ids_of(thought), 0
            if request.past:
                past = request.past[index]
                if past.finish_reason is not None:
                    continue
                start = len(past.token_ids)
                was_cut = past.token_ids != ids[:start]
                ids = ids_of(self._answer_text) if was_cut else ids[start:]
            turns = turns_of(ids, self._sizes, sequence_index=index)
            if request.sampling_params.logprobs is not None:
                for (delta,) in turns:
                    delta.logprobs = [position_of(token_id) for token_id in delta.token_ids]
            for turn in turns:
                turn[0].start += start
            by_sequence.append(turns)
        longest = max(map(len, by_sequence))
        return [
            [delta for turns in by_sequence if n < len(turns) for delta in turns[n]]
            for n in range(longest)
        ]


async def run(
    engine: Engine, budget: int | None, **params: Any
) -> tuple[FinishedGeneration, list[EngineRequest]]:
    generation = await Generation.create(engine, GenerationSettings())
    rendered = generation.render_chat([{"role": "user", "content": "x"}])
    request = GenerationRequest(
        prompt_token_ids=rendered.token_ids,
        sampling_params=SamplingParams(**params),
        answer=generation.answer_format(rendered, ToolUse(), thinking_token_budget=budget),
    )
    return await (await generation.start(request)).collect(), engine.requests


sizes = st.lists(st.integers(1, 7), max_size=8)


@settings(max_examples=40)
@given(sizes=sizes, budget=st.integers(0, 20))
async def test_reasoning_is_cut_at_its_budget_however_tokens_come(
    sizes: list[int], budget: int
) -> None:
    engine = Engine(["a b c d e f g h i j k l m n o p"], "Yes.", sizes, OPENED)
    whole, requests = await run(engine, budget)
    (sequence,) = whole.sequences
    thought = "a b c d e f g h i j k l m n o p"[:budget]
    assert sequence.reasoning == thought.strip()
    assert sequence.text == "Yes."
    assert sequence.token_ids == ids_of(thought + END + "Yes.")
    assert [len(request.past) for request in requests] == [0, 1]
    assert requests[1].past[0].token_ids == ids_of(thought + END)
    assert requests[0].request_id != requests[1].request_id
    assert requests[0].prompt_token_ids == requests[1].prompt_token_ids
    assert engine.streams[0].aborts == 1


@settings(max_examples=40)
@given(sizes=sizes, budget=st.integers(0, 20), logprobs=st.sampled_from([None, 0]))
async def test_a_character_that_is_begun_is_finished_before_reasoning_is_cut(
    sizes: list[int], budget: int, logprobs: int | None
) -> None:
    thought = "é世🙂" * 4
    engine = Engine([thought], "Yes.", sizes, OPENED)
    whole, requests = await run(engine, budget, logprobs=logprobs)
    kept = whole.sequences[0].reasoning
    assert thought.startswith(kept)
    assert 0 <= len(kept.encode()) - budget <= 3
    assert requests[1].past[0].token_ids == ids_of(kept + END)


@settings(max_examples=30)
@given(sizes=sizes, budget=st.integers(0, 12), room=st.integers(1, 40))
async def test_each_token_has_its_log_probability_written_ones_too(
    sizes: list[int], budget: int, room: int
) -> None:
    max_tokens = budget + room
    engine = Engine(["a b c d e f g h i j k l m n o p q r s t"], "Yes, they do.", sizes, OPENED)
    whole, requests = await run(engine, budget, logprobs=1, max_tokens=max_tokens)
    (sequence,) = whole.sequences
    told = [position.token for position in sequence.logprobs]
    assert [token.token_id for token in told] == sequence.token_ids
    written = range(budget, min(budget + len(ids_of(END)), max_tokens))
    for n, token in enumerate(told):
        expected = 0.0 if n in written else position_of(token.token_id).token.logprob
        assert token.logprob == expected
    texts = [position.token.text for position in sequence.logprobs]
    offsets = [position.text_offset for position in sequence.logprobs]
    assert offsets == [len("".join(texts[:n])) for n in range(len(texts))]
    if len(requests) > 1:
        past = requests[1].past[0]
        assert past.cumulative_logprob == pytest.approx(
            sum(t.logprob for t in told[: len(past.token_ids)])
        )


@pytest.mark.parametrize("template", [OPENED, UNOPENED])
@pytest.mark.parametrize("budget", [None, 50])
async def test_reasoning_within_its_budget_is_left_alone(template: str, budget: int | None) -> None:
    opener = "" if template is OPENED else "<think>"
    engine = Engine([f"{opener}Hm\n</think>\n\n{'Yes. ' * 20}"], "", [3, 60], template)
    whole, requests = await run(engine, budget)
    assert whole.sequences[0].reasoning == "Hm"
    assert whole.sequences[0].text == "Yes. " * 20
    assert len(requests) == 1


async def test_the_engine_lets_go_of_it_only_when_it_was_handed_over_again() -> None:
    engine = Engine(["thinking", "thinking"], "done", [], OPENED)
    aborts: list[list[int]] = []
    submit = engine.submit

    async def watched(request: EngineRequest) -> ReplayingStream:
        await asyncio.sleep(0)  # so that what was left to the background has run
        aborts.append([stream.aborts for stream in engine.streams])
        return await submit(request)

    engine.submit = watched  # type: ignore[method-assign]
    await run(engine, 3, n=2)
    assert aborts[:2] == [[], [0]]
    await asyncio.sleep(0)
    assert [stream.aborts for stream in engine.streams] == [1] * (len(aborts) - 1) + [0]


async def test_an_answer_without_reasoning_has_no_budget() -> None:
    whole, requests = await run(Engine(["Yes, yes."], "", [], UNOPENED), 2)
    assert (whole.sequences[0].text, len(requests)) == ("Yes, yes.", 1)


async def test_reasoning_that_the_model_opens_is_cut_too() -> None:
    whole, _ = await run(Engine(["<think>abcdefgh"], "Yes.", [30], UNOPENED), 9)
    assert (whole.sequences[0].reasoning, whole.sequences[0].text) == ("ab", "Yes.")


async def test_sequences_are_cut_each_by_itself() -> None:
    thoughts = ["abc\n</think>\n\nShort, but not too short.", "abcdefghijklmnop", "a</think>B"]
    engine = Engine(thoughts, "Yes.", [], OPENED)
    whole, requests = await run(engine, 14, n=3)
    assert [one.reasoning for one in whole.sequences] == ["abc", "abcdefghijklmn", "a"]
    assert [one.text for one in whole.sequences] == ["Short, but not too short.", "Yes.", "B"]
    assert len(requests) == 2
    assert [past.finish_reason for past in requests[1].past] == [None, None, FinishReason.LENGTH]


async def test_max_tokens_bounds_the_end_that_is_written_too() -> None:
    engine = Engine(["abcdefgh"], "", [], OPENED)
    whole, requests = await run(engine, 4, max_tokens=6)
    assert whole.sequences[0].token_ids == ids_of("abcd" + END)[:6]
    assert len(requests[1].past[0].token_ids) == 6
    assert whole.sequences[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("template", "budget"), [("{{ messages[0].content }}", 5), (OPENED, -1)])
async def test_a_budget_that_can_not_be_kept_is_refused(template: str, budget: int) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        await run(Engine(["a"], "", [], template), budget)
    assert raised.value.field == "thinking_token_budget"
