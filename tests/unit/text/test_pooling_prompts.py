"""Texts and pairs become the tokens that the model's own tokenizer makes of them, cut where
asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

from pagewire import LLM, PoolingParams
from pagewire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from pagewire.pooling import PoolingInfo, Task
from pagewire_frontend.errors import TooManyTokensError
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.pooling import PoolingPrompt, PoolingRequest, pool
from pagewire_frontend.tokenizer import Tokenizer
from tests.fakes.fake_engine_client import FakeEngineClient, ids_of
from tests.fakes.tiny_models import write_tiny_wordpiece

CLS, SEP = 2, 3
WORDS = st.text(alphabet="ab1 é!", max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wordpiece")
    write_tiny_wordpiece(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Tokenizer.from_files(files)


@pytest.fixture(scope="module")
def hub(folder: Path) -> HubTokenizer:
    made = HubTokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_padding()
    return made


@given(text=WORDS, second=st.none() | WORDS, limit=st.integers(4, 20))
def test_what_is_cut_is_what_the_library_would_cut(
    tokenizer: Tokenizer, hub: HubTokenizer, text: str, second: str | None, limit: int
) -> None:
    hub.no_truncation()
    whole = hub.encode(text, second)
    assert tokenizer.encode_pair(text, second, max_tokens=100) == (
        list(whole.ids),
        whole.type_ids.index(1) if second is not None else 0,
    )
    if second is not None:
        first_alone = len(hub.encode(text, add_special_tokens=False).ids)
        second_alone = len(hub.encode(second, add_special_tokens=False).ids)
        if first_alone + 3 + min(1, second_alone) > limit:
            with pytest.raises(TooManyTokensError):
                tokenizer.encode_pair(text, second, max_tokens=limit, truncate=True)
            return
    hub.enable_truncation(limit, strategy="only_second" if second is not None else "longest_first")
    if second is not None and len(whole.ids) <= limit:
        hub.no_truncation()
    cut = hub.encode(text, second)
    ours, _ = tokenizer.encode_pair(text, second, max_tokens=limit, truncate=True)
    assert ours == list(cut.ids)


@pytest.mark.parametrize("text", ["ab c1 é", "a", "", "x" * 150 + " ", "!é"])
@pytest.mark.parametrize("ending", ["", "b1", "x" * 200])
def test_of_a_very_long_text_the_same_is_kept(
    tokenizer: Tokenizer, hub: HubTokenizer, text: str, ending: str
) -> None:
    long = text * (20_000 // max(1, len(text))) + " " * 50_000 + ending
    hub.enable_truncation(8)
    ours, _ = tokenizer.encode_pair(long, max_tokens=8, truncate=True)
    assert ours == list(hub.encode(long).ids)
    if len(tokenizer.encode(long)) > 8:
        with pytest.raises(TooManyTokensError):
            tokenizer.encode_pair(long, max_tokens=8)


def test_the_file_s_own_limits_play_no_part(tokenizer: Tokenizer) -> None:
    ids, _ = tokenizer.encode_pair("a b c d e f g h i j", max_tokens=100)
    assert len(ids) == 12
    assert (ids[0], ids[-1]) == (CLS, SEP)


def test_control_tokens_in_texts_are_read_or_not(tokenizer: Tokenizer) -> None:
    parsed, _ = tokenizer.encode_pair("[SEP]", max_tokens=100)
    plain, _ = tokenizer.encode_pair("[SEP]", max_tokens=100, parse_special_tokens=False)
    assert parsed == [CLS, SEP, SEP]
    assert SEP not in plain[1:-1]
    assert len(plain) > 3


def test_there_must_be_room_for_what_can_not_be_cut(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_pair("abc", max_tokens=2, truncate=True) == ([CLS, SEP], 0)
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_pair("abc", max_tokens=1, truncate=True)
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode_pair("a b c", max_tokens=4)
    assert (caught.value.count, caught.value.limit) == ("5", 4)
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode_pair("a " * 100_000, max_tokens=4)
    assert caught.value.count.startswith("at least ")
    assert caught.value.num_tokens < 10_000, "not all of it was looked at"


# The path to the engine --------------------------------------------------------------------------


async def generation(engine: FakeEngineClient) -> Generation:
    return await Generation.create(engine, GenerationSettings())


async def until(condition: Callable[[], object]) -> None:
    """Lets others run until the condition holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


def embedder(**options: object) -> FakeEngineClient:
    return FakeEngineClient(
        tasks=(Task.EMBED, Task.SCORE),
        pooling=PoolingInfo(4),
        **options,  # type: ignore[arg-type]  # keyword options
    )


def texts(*given: str) -> PoolingRequest:
    prompts = [PoolingPrompt(f"input[{n}]", text=text) for n, text in enumerate(given)]
    return PoolingRequest(prompts, PoolingParams())


async def test_a_cancelled_call_aborts_all_that_runs() -> None:
    engine = embedder(hang_after=0)
    running = asyncio.ensure_future(pool(await generation(engine), texts(*"abcdef")))
    await until(lambda: len(engine.requests) == 6)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not engine.live)
    assert len(engine.aborted) == 6


@pytest.mark.parametrize("bound", [None, 7])
async def test_a_call_with_many_prompts_leaves_room_in_the_queue(bound: int | None) -> None:
    engine = embedder(hang_after=0)
    request = texts(*["a"] * 600)
    if bound is not None:
        request = replace(request, most_in_flight=bound)
    running = asyncio.ensure_future(pool(await generation(engine), request))
    await until(lambda: len(engine.requests) == (bound or 256))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(engine.requests) == (bound or 256)
    running.cancel()
    await asyncio.wait([running])


async def test_nothing_runs_where_one_prompt_is_wrong() -> None:
    engine = embedder()
    with pytest.raises(InvalidArgumentError) as caught:
        await pool(await generation(engine), texts("a", "b", ""))
    assert caught.value.field == "input[2]"
    assert engine.requests == []


async def test_no_prompts_give_no_vectors() -> None:
    assert await pool(await generation(embedder()), texts()) == []


async def test_the_engines_failure_is_the_calls() -> None:
    engine = embedder(fail_after=0, failure=UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await pool(await generation(engine), texts("a", "b"))


# LLM ---------------------------------------------------------------------------------------------


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.from_client(embedder(max_model_len=16)) as made:
        yield made


def counts(text: str) -> list[float]:
    return [float(sum(i % 4 == n for i in ids_of(text))) for n in range(4)]


def test_llm_embeds_prompts_of_every_kind(llm: LLM) -> None:
    prompts = ["hello", {"prompt": "you"}, {"prompt_token_ids": ids_of("hello")}]
    outputs = llm.embed(prompts, use_tqdm=False)
    assert [each.outputs.embedding for each in outputs] == [
        counts(text) for text in ("hello", "you", "hello")
    ]
    assert outputs[1].prompt_token_ids == ids_of("you")
    assert llm.encode("hello", use_tqdm=False)[0].outputs.data == counts("hello")
    assert llm.embed([], use_tqdm=False) == []
    (cut,) = llm.embed("x" * 99, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(cut.prompt_token_ids) == 16


def test_llm_scores_by_cosine(llm: LLM) -> None:
    scores = llm.score("a", ["a", "b"], use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx([1.0, 0.0])
    assert llm.score("a", [], use_tqdm=False) == []
    with pytest.raises(InvalidArgumentError, match="one for each"):
        llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)


def test_llm_classifies() -> None:
    engine = FakeEngineClient(
        tasks=(Task.CLASSIFY,), pooling=PoolingInfo(3, labels=("x", "y", "z"))
    )
    with LLM.from_client(engine) as llm:
        (output,) = llm.classify("hello", use_tqdm=False)
        assert (output.outputs.probs, output.outputs.label) == ([0.0, 0.1, 0.2], "z")
        assert llm.encode("hello", use_tqdm=False)[0].outputs.data == [0.0, 0.1, 0.2]
        with pytest.raises(FailedPreconditionError, match="gives no embeddings"):
            llm.embed("hello", use_tqdm=False)


@pytest.mark.parametrize(
    "prompt", [3, None, {}, {"prompt": 3}, {"prompt_token_ids": ["a"]}, {"text": "a"}, ["a"]]
)
def test_llm_refuses_what_is_no_prompt(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        llm.embed(["a", prompt], use_tqdm=False)  # type: ignore[list-item]  # wrong on purpose
    assert caught.value.field == "prompts[1]"


def test_llm_says_what_a_model_can_not_do(llm: LLM) -> None:
    with pytest.raises(FailedPreconditionError, match="generates no text"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(FailedPreconditionError, match="generates no text"):
        llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)
    with LLM.from_client(FakeEngineClient()) as other:
        for ask in (other.embed, other.encode):
            with pytest.raises(FailedPreconditionError, match="--runner pooling"):
                ask("a", use_tqdm=False)
        with pytest.raises(FailedPreconditionError, match="--runner pooling"):
            other.score("a", "b", use_tqdm=False)
