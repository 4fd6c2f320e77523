"""Text to text over an engine whose answers are decided beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes, TokenLogprob
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta
from pagewire_frontend.errors import ChatTemplateError
from pagewire_frontend.finished import FinishedGeneration, FinishedSequence
from pagewire_frontend.generation import (
    Generation,
    GenerationSettings,
)
from pagewire_frontend.generation_types import (
    COMPLETION_MAX_TOKENS,
    GenerationRequest,
    GenerationUpdate,
)
from tests.fakes import small_tokenizers
from tests.fakes.replaying_client import ReplayingClient, turns_of

TOKENIZER = small_tokenizers.byte_level()
FILES = small_tokenizers.byte_level_files("{{ messages[0].content }}<|im_end|>")
TEXT = "The capital of France is Paris. It lies on the Seine 🙂 and STOP goes on."
IDS = TOKENIZER.encode(TEXT)
END = 2
PADDED_VOCABULARY = TOKENIZER.vocab_size + 10
Turns = Sequence[list[TokenDelta] | Exception]


def client(turns: Turns | None = None, **options: object) -> ReplayingClient:
    answer = turns_of(IDS) if turns is None else turns
    return ReplayingClient(FILES, lambda _: answer, vocab_size=PADDED_VOCABULARY, **options)  # type: ignore[arg-type]  # keyword options


async def generation(
    turns: Turns | None = None, settings: GenerationSettings | None = None, **options: object
) -> tuple[Generation, ReplayingClient]:
    fake = client(turns, **options)
    return await Generation.create(fake, settings or GenerationSettings()), fake


async def finished(
    turns: Turns | None = None, prompt: str = "A prompt.", **params: object
) -> tuple[FinishedGeneration, ReplayingClient]:
    path, fake = await generation(turns)
    sampling_params = SamplingParams(**params)  # type: ignore[arg-type]  # keyword options
    running = await path.start(GenerationRequest(prompt=prompt, sampling_params=sampling_params))
    result = await running.collect()
    await asyncio.sleep(0)
    return result, fake


async def only(turns: Turns | None = None, **params: object) -> FinishedSequence:
    result, _ = await finished(turns, **params)
    return result.sequences[0]


# Text --------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 9), max_size=30), stop=st.sampled_from([None, "STOP", "🙂 a"]))
def test_deltas_join_to_the_text_however_tokens_are_grouped(
    sizes: list[int], stop: str | None
) -> None:
    async def run() -> FinishedSequence:
        return await only(turns_of(IDS, sizes), stop=stop or ())

    sequence = asyncio.run(run())
    if stop is None:
        assert (sequence.text, sequence.token_ids) == (TEXT, IDS)
        assert sequence.finish_reason is FinishReason.LENGTH
        return
    assert sequence.text == TEXT[: TEXT.index(stop)]
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, stop)
    # Through the token that completed the stop string, and not one further.
    n = len(sequence.token_ids)
    assert sequence.token_ids == IDS[:n]
    assert stop in TOKENIZER.decode(IDS[:n])
    assert stop not in TOKENIZER.decode(IDS[: n - 1])


async def test_a_partial_stop_string_is_flushed_at_the_end() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.STOP):
        ids = [*TOKENIZER.encode("ab STO"), END]
        sequence = await only(turns_of(ids, finish_reason=reason), stop="STOP")
        assert sequence.text == "ab STO"
        assert sequence.stop_reason is None


async def test_a_stop_string_tells_the_engine_to_end_the_sequence() -> None:
    _, fake = await finished(stop="STOP")
    assert fake.streams[0].finished_sequences == [0]


async def test_the_stop_string_is_kept_where_asked() -> None:
    sequence = await only(stop="STOP", include_stop_str_in_output=True)
    assert sequence.text.endswith(" and STOP")


async def test_min_tokens_suspends_stop_strings() -> None:
    before = (await only(stop="Paris")).token_ids
    sequence = await only(stop="Paris", min_tokens=len(before) + 1)
    assert (sequence.text, sequence.finish_reason) == (TEXT, FinishReason.LENGTH)
    assert (await only(stop="Paris", min_tokens=len(before))).stop_reason == "Paris"


async def test_a_character_cut_by_the_length_limit_is_told_as_the_full_decode_has_it() -> None:
    ids = TOKENIZER.encode("Hi 🙂", add_special_tokens=False)[:-1]
    sequence = await only(turns_of(ids))
    assert sequence.text == TOKENIZER.decode(ids) == "Hi \ufffd"


async def test_the_stop_token_counts_and_has_no_text_unless_asked_for() -> None:
    word = TOKENIZER.encode(".", add_special_tokens=False)
    ids = [*TOKENIZER.encode("Hi"), *word]
    turns = turns_of(ids, [2, 9], finish_reason=FinishReason.STOP, stop_token_id=word[0])
    sequence = await only(turns, stop_token_ids=word)
    assert (sequence.text, sequence.stop_reason) == ("Hi", word[0])
    assert sequence.token_ids == ids
    kept = await only(turns, stop_token_ids=word, include_stop_str_in_output=True)
    assert kept.text == "Hi."


def told_late(turns: list[list[TokenDelta]]) -> list[list[TokenDelta]]:
    """The same turns, the finish in one of its own behind the last token."""
    (last,) = turns[-1]
    end = TokenDelta(last.sequence_index, last.start + len(last.token_ids), [])
    end.finish_reason, end.stop_token_id = last.finish_reason, last.stop_token_id
    last.finish_reason = last.stop_token_id = None
    return [*turns, [end]]


@pytest.mark.parametrize("stop", [(), "never said"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("sizes", [[], [2], [9]])
async def test_a_stop_token_has_no_text_though_the_finish_comes_after_it(
    stop: str, kept: bool, sizes: list[int]
) -> None:
    word = TOKENIZER.encode(".", add_special_tokens=False)
    ids = [*TOKENIZER.encode("Hi"), *word]
    turns = turns_of(ids, sizes, finish_reason=FinishReason.STOP, stop_token_id=word[0])
    sequence = await only(
        told_late(turns), stop=stop, stop_token_ids=word, include_stop_str_in_output=kept
    )
    assert (sequence.text, sequence.token_ids) == ("Hi." if kept else "Hi", ids)
    assert sequence.stop_reason == word[0]


async def test_a_stop_token_that_ended_nothing_keeps_its_text_its_place_and_its_logprob() -> None:
    word = TOKENIZER.encode(".", add_special_tokens=False)
    for turns in (with_logprobs(IDS), told_late(with_logprobs(IDS))):
        sequence = await only(turns, stop_token_ids=word, logprobs=0)
        assert (sequence.text, sequence.token_ids) == (TEXT, IDS)
        assert [p.token.token_id for p in sequence.logprobs] == IDS
        assert sequence.finish_reason is FinishReason.LENGTH
    # The last token of all may be one, and the length the reason.
    ids = [*TOKENIZER.encode("Hi"), *word]
    assert (await only(told_late(turns_of(ids)), stop_token_ids=word)).text == "Hi."


async def test_the_end_token_of_the_model_has_no_text_though_the_finish_comes_after_it() -> None:
    turns = told_late(turns_of([*IDS, END], finish_reason=FinishReason.STOP))
    path, _ = await generation(turns, eos_token_ids=(END,))
    params = SamplingParams(skip_special_tokens=False)
    running = await path.start(GenerationRequest(prompt="x", sampling_params=params))
    assert (await running.collect()).sequences[0].text == TEXT


async def test_end_of_sequence_has_no_text_and_no_stop_reason() -> None:
    turns = turns_of([*TOKENIZER.encode("Hi"), END], [9], finish_reason=FinishReason.STOP)
    sequence = await only(turns, skip_special_tokens=False)
    assert (sequence.text, sequence.stop_reason) == ("Hi", None)
    assert sequence.finish_reason is FinishReason.STOP


async def test_sequences_of_a_request_stop_each_at_its_own_place() -> None:
    other = TOKENIZER.encode("STOP at once, but go on until the end.")
    second = turns_of(other, sequence_index=1)
    both = [a + b for a, b in zip(turns_of(IDS), second, strict=False)]
    longest = max(turns_of(IDS)[len(both) :], second[len(both) :], key=len)
    result, fake = await finished([*both, *longest], n=2, stop="STOP")
    assert [s.text for s in result.sequences] == [TEXT[: TEXT.index("STOP")], ""]
    assert sorted(fake.streams[0].finished_sequences) == [0, 1]


async def test_the_prompts_half_character_is_not_in_the_answer() -> None:
    emoji = TOKENIZER.encode("🙃", add_special_tokens=False)
    assert len(emoji) > 1
    path, _ = await generation(turns_of([*emoji[-1:], *TOKENIZER.encode("ok")]))
    running = await path.start(GenerationRequest(prompt_token_ids=[5, *emoji[:-1]]))
    assert (await running.collect()).sequences[0].text == "ok"


# Log probabilities -------------------------------------------------------------------------------


def with_logprobs(ids: Sequence[int]) -> list[list[TokenDelta]]:
    turns = turns_of(ids)
    for (delta,) in turns:
        (token,) = delta.token_ids
        top = [TokenLogprob(token, -0.5, 1), TokenLogprob(PADDED_VOCABULARY - 1, -2.0, 2)]
        delta.logprobs = [PositionLogprobs(TokenLogprob(token, -0.5, 1), top)]
    return turns


async def test_logprobs_carry_text_bytes_and_place() -> None:
    text = "Hi 🙂 you"
    ids = TOKENIZER.encode(text)
    sequence = await only(with_logprobs(ids), logprobs=2)
    assert b"".join(p.token.bytes for p in sequence.logprobs) == text.encode()
    assert {p.token.text for p in sequence.logprobs} >= {"\ufffd"}
    assert [p.text_offset for p in sequence.logprobs][:2] == [0, len(TOKENIZER.decode(ids[:1]))]
    padded = sequence.logprobs[0].top[1]
    assert (padded.text, padded.bytes) == ("", b"")


async def test_logprobs_end_with_the_token_that_completed_the_stop_string() -> None:
    sequence = await only(with_logprobs(IDS), logprobs=0, stop="STOP")
    assert len(sequence.logprobs) == len(sequence.token_ids)
    assert sequence.cumulative_logprob == pytest.approx(-0.5 * len(sequence.token_ids))


async def test_prompt_logprobs_arrive_once_though_they_are_sent_again() -> None:
    positions = [PositionLogprobs(TokenLogprob(n, -1.0, 1), []) for n in range(4)]
    turns = turns_of(IDS)
    for turn, (start, end) in zip(turns, [(1, 3), (1, 4), (3, 5)], strict=False):
        turn[0].prompt_logprobs = positions[start - 1 : end - 1]
        turn[0].prompt_logprobs_start = start
    result, _ = await finished(turns, prompt_logprobs=0)
    assert result.prompt_logprobs == positions


# Requests ----------------------------------------------------------------------------------------


async def test_max_tokens_defaults_to_what_the_context_has_left() -> None:
    path, fake = await generation(max_model_len=100)
    await path.start(GenerationRequest(prompt_token_ids=[5] * 60))
    assert fake.requests[0].sampling_params.max_tokens == 40


async def test_a_completions_default_of_max_tokens_gives_way_to_the_context() -> None:
    path, fake = await generation(max_model_len=100)
    for length in (60, 95):
        await path.start(
            GenerationRequest(
                prompt_token_ids=[5] * length, default_max_tokens=COMPLETION_MAX_TOKENS
            )
        )
    assert [request.sampling_params.max_tokens for request in fake.requests] == [16, 5]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest(), "prompt"),
        (GenerationRequest(prompt=""), "prompt"),
        (GenerationRequest(prompt_token_ids=[]), "prompt_token_ids"),
        (GenerationRequest(prompt_token_ids=[5, PADDED_VOCABULARY]), "prompt_token_ids"),
        (GenerationRequest(prompt_token_ids=[-1]), "prompt_token_ids"),
        (GenerationRequest(prompt_token_ids=[5] * 100), "prompt"),
        (GenerationRequest(prompt="x" * 20_000), "prompt"),
        (
            GenerationRequest(
                prompt_token_ids=[5] * 60, sampling_params=SamplingParams(max_tokens=41)
            ),
            "max_tokens",
        ),
        (
            GenerationRequest(
                prompt_token_ids=[5] * 60, sampling_params=SamplingParams(min_tokens=41)
            ),
            "min_tokens",
        ),
        (
            GenerationRequest(
                prompt="x", sampling_params=SamplingParams(stop_token_ids=(PADDED_VOCABULARY,))
            ),
            "stop_token_ids",
        ),
        (
            GenerationRequest(
                prompt="x", sampling_params=SamplingParams(logit_bias={PADDED_VOCABULARY: 1.0})
            ),
            "logit_bias",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_by_field(
    request_: GenerationRequest, field: str
) -> None:
    path, fake = await generation(max_model_len=100)
    with pytest.raises(InvalidArgumentError) as raised:
        await path.start(request_)
    assert raised.value.field == field
    assert not fake.requests


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    path, _ = await generation(max_model_len=100)
    text = "x" * 5_000_000
    for attempt in (
        lambda: path.start(GenerationRequest(prompt=text)),
        lambda: asyncio.to_thread(path.render_chat, [{"role": "user", "content": text}]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"at least .* context of 100"):
            await attempt()


async def test_an_unknown_model_is_refused_by_name() -> None:
    path, _ = await generation()
    assert path.check_model("") == path.check_model("replay") == "replay"
    with pytest.raises(NotFoundError, match="replay"):
        await path.start(GenerationRequest(model="other", prompt="x"))


async def test_a_second_live_request_with_an_id_is_refused_and_a_later_one_is_not() -> None:
    path, fake = await generation(endless=True)
    request = GenerationRequest(request_id="mine", prompt="x", tenant="a")
    first = await path.start(request)
    with pytest.raises(AlreadyExistsError, match="mine"):
        await path.start(request)
    await path.start(GenerationRequest(request_id="mine", prompt="x", tenant="b"))
    await first.aclose()
    again = await path.start(request)
    await again.aclose()
    ids = [request.request_id for request in fake.requests]
    assert len(set(ids)) == 3
    assert all(request_id.startswith("mine-") for request_id in ids)


async def test_an_id_is_free_again_after_the_end_a_refusal_and_a_failure() -> None:
    path, fake = await generation()
    request = GenerationRequest(request_id="mine", prompt="x")
    for _ in range(2):
        await (await path.start(request)).collect()
    submit, fake.submit = fake.submit, refuse  # type: ignore[method-assign]  # for one request
    with pytest.raises(UnavailableError):
        await path.start(request)
    fake.submit = submit  # type: ignore[method-assign]
    await (await path.start(request)).collect()


async def refuse(request: EngineRequest) -> None:
    raise UnavailableError(f"{request.request_id} is refused")


async def test_closing_early_aborts_in_the_engine_once() -> None:
    path, fake = await generation(endless=True)
    running = await path.start(GenerationRequest(prompt="x", sampling_params=SamplingParams(n=2)))
    await anext(running)
    await running.aclose()
    await running.aclose()
    assert fake.streams[0].aborts == 1
    with pytest.raises(StopAsyncIteration):
        await anext(running)


async def test_closing_after_the_end_aborts_nothing() -> None:
    path, fake = await generation()
    running = await path.start(GenerationRequest(prompt="x"))
    await running.collect()
    await running.aclose()
    assert fake.streams[0].aborts == 0


async def test_a_cancelled_reader_aborts_in_the_engine() -> None:
    path, fake = await generation([], endless=True)
    running = await path.start(GenerationRequest(prompt="x"))
    reader = asyncio.create_task(running.collect())
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.sleep(0.01)
    assert fake.streams[0].aborts == 1


@pytest.mark.parametrize("stop", [(), "STOP"])
async def test_a_token_of_the_padded_vocabulary_counts_and_has_no_text(stop: str) -> None:
    ids = [IDS[0], PADDED_VOCABULARY - 1, *IDS[1:]]
    sequence = await only(with_logprobs(ids), logprobs=1, stop=stop)
    assert sequence.text == (TEXT[: TEXT.index("STOP")] if stop else TEXT)
    assert sequence.token_ids == ids[: len(sequence.token_ids)]
    assert len(sequence.logprobs) == len(sequence.token_ids)
    assert (sequence.logprobs[1].token.text, sequence.logprobs[1].token.bytes) == ("", b"")


async def test_what_the_engine_failed_with_reaches_the_reader() -> None:
    path, _ = await generation([*turns_of(IDS[:2], finish_reason=None), UnavailableError("gone")])
    running = await path.start(GenerationRequest(prompt="x"))
    with pytest.raises(UnavailableError, match="gone"):
        await running.collect()


async def test_times_are_in_the_last_update() -> None:
    turns = turns_of(IDS)
    turns[-1][0].times = RequestTimes(queue_s=1.5, cached_tokens=3)
    path, _ = await generation(turns)
    updates: list[GenerationUpdate] = []
    async for update in await path.start(GenerationRequest(prompt="x")):
        updates.append(update)  # noqa: PERF401 (an async iterator)
    assert [update.times for update in updates[:-1]] == [None] * (len(updates) - 1)
    assert updates[-1].times == turns[-1][0].times


# Settings ----------------------------------------------------------------------------------------


async def test_control_tokens_are_parsed_in_prompts_and_not_in_chats_unless_set_otherwise() -> None:
    messages = [{"role": "user", "content": "Hi<|im_end|>"}]
    for parse in (True, False):
        chosen = GenerationSettings(
            parse_control_tokens_in_chat=parse, parse_control_tokens_in_prompts=parse
        )
        path, fake = await generation(settings=chosen)
        assert path.render_chat(messages).token_ids.count(END) == 1 + parse
        await path.start(GenerationRequest(prompt="Hi<|im_end|>"))
        assert fake.requests[0].prompt_token_ids.count(END) == parse
    path, _ = await generation()
    assert path.render_chat(messages).token_ids.count(END) == 1


async def test_requests_bring_a_template_only_where_the_operator_allows_it() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    path, _ = await generation()
    with pytest.raises(FailedPreconditionError, match="--allow-request-chat-template"):
        path.render_chat(messages, chat_template="{{ messages }}")
    allowed, _ = await generation(settings=GenerationSettings(allow_request_chat_template=True))
    assert allowed.render_chat(messages, chat_template="own").prompt == "own"
    with pytest.raises(ChatTemplateError, match="line 1"):
        allowed.render_chat(messages, chat_template="{% if %}")


async def test_an_engine_without_a_tokenizer_serves_token_ids() -> None:
    fake = ReplayingClient({}, lambda _: turns_of([7, 8]), vocab_size=100)
    path = await Generation.create(fake, GenerationSettings())
    result = await (await path.start(GenerationRequest(prompt_token_ids=[5]))).collect()
    assert (result.sequences[0].text, result.sequences[0].token_ids) == ("", [7, 8])
    with pytest.raises(FailedPreconditionError, match="--skip-tokenizer-init"):
        await path.start(GenerationRequest(prompt="text"))
    with pytest.raises(FailedPreconditionError, match="--skip-tokenizer-init"):
        path.render_chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(InvalidArgumentError, match="token ids only"):
        await path.start(
            GenerationRequest(prompt_token_ids=[5], sampling_params=SamplingParams(stop="x"))
        )
