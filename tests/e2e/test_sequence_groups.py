"""n, best_of and beam search through every API, over real sockets, with a real model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from pagewire import LLM, BeamSearchParams, SamplingParams
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.serve_process import MODEL, Served

PROMPT = "The three primary colours are"


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    settings = {"max_model_len": 512, "kv_cache_memory": 64 * 2**20, "num_threads": 1}
    with LLM(model=str(smollm2_path), **settings) as llm:
        yield llm


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {
        name: fields.pop(name)
        for name in ("use_beam_search", "length_penalty", "early_stopping", "return_token_ids")
        if name in fields
    }
    return client.completions.create(
        model=MODEL, prompt=PROMPT, **{"max_tokens": 8} | fields, extra_body=extra
    )


def test_openai_n_gives_different_texts_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 5}
    whole = complete(client, **asked)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in complete(client, **asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2, seed=1, max_tokens=6
    )
    assert [choice.index for choice in chat.choices] == [0, 1]


def test_openai_best_of_gives_the_likeliest_of_the_n(client: openai.OpenAI) -> None:
    asked = {"temperature": 1.0, "seed": 5}
    every = complete(client, **asked, n=4, logprobs=0)
    ranked = sorted(every.choices, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    best = complete(client, **asked, n=2, best_of=4)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == 32, "the candidates were produced, all of them"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"n": 200, "use_beam_search": True}, "n"),
        ({"n": 2, "use_beam_search": True, "stop": "."}, "stop"),
    ],
)
def test_openai_refuses_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **fields)
    assert caught.value.param == param


def test_every_api_finds_the_same_beams(client: openai.OpenAI, stub: Any, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=12, length_penalty=0.5, logprobs=1)
    (found,) = llm.beam_search([PROMPT], params)
    first, second = found.sequences
    assert first.output.token_ids != second.output.token_ids
    scores = [each.cum_logprob / len(each.output.token_ids) ** 0.5 for each in found.sequences]
    assert scores[0] > scores[1]
    assert first.text.startswith(PROMPT)
    assert first.tokens[-len(first.output.token_ids) :] == first.output.token_ids
    assert first.logprobs is not None
    total = sum(
        entry[token_id].logprob
        for entry, token_id in zip(first.logprobs, first.output.token_ids, strict=True)
    )
    assert math.isclose(total, first.cum_logprob, rel_tol=1e-4)
    texts = [each.output.text for each in found.sequences]

    search = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5}
    whole = complete(client, **search, max_tokens=12)
    assert [choice.text for choice in whole.choices] == texts
    streamed = ["", ""]
    for chunk in complete(client, **search, max_tokens=12, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts

    request = inference_pb2.GenerateRequest(text=PROMPT)
    request.beam_search.beam_width = 4
    request.beam_search.n = 2
    request.beam_search.max_tokens = 12
    request.beam_search.length_penalty = 0.5
    unary = stub.GenerateUnary(request, timeout=60)
    assert [output.text for output in unary.outputs] == texts
    parts = list(stub.Generate(request, timeout=60))
    assert [output.text for part in parts for output in part.outputs] == texts
    assert parts[-1].usage.completion_tokens == unary.usage.completion_tokens


def test_a_beam_search_is_at_least_as_likely_as_greedy(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
    (single,) = llm.generate(PROMPT, greedy, use_tqdm=False)
    params = BeamSearchParams(beam_width=5, max_tokens=10, ignore_eos=True)
    (found,) = llm.beam_search(PROMPT, params)
    assert len(found.sequences) == 5
    assert single.outputs[0].cumulative_logprob is not None
    assert found.sequences[0].cum_logprob >= single.outputs[0].cumulative_logprob - 1e-3


def test_chat_searches_with_beams_too(client: openai.OpenAI, stub: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]  # a plain dict
        max_tokens=16,
        n=2,
        extra_body={"use_beam_search": True, "early_stopping": "never"},
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    request = inference_pb2.ChatRequest()
    request.messages.add(role="user").content.add(text=messages[0]["content"])
    request.beam_search.beam_width = 2
    request.beam_search.max_tokens = 16
    request.beam_search.early_stopping = 3  # type: ignore[assignment]  # EARLY_STOPPING_NEVER
    reply = stub.ChatUnary(request, timeout=60)
    assert [choice.content for choice in reply.choices] == [
        choice.message.content for choice in answer.choices
    ]


def test_grpc_best_of_comes_at_the_end(stub: Any) -> None:
    request = inference_pb2.GenerateRequest(text=PROMPT)
    request.sampling_params.n = 1
    request.sampling_params.best_of = 3
    request.sampling_params.seed = 5
    request.sampling_params.max_tokens = 8
    parts = [part for part in stub.Generate(request, timeout=60) if part.outputs]
    assert len(parts) == 1
    unary = stub.GenerateUnary(request, timeout=60)
    assert unary.outputs[0].text == parts[0].outputs[0].text
    assert unary.usage.completion_tokens == 24


def test_llm_best_of_needs_no_logprobs_from_the_client(llm: LLM) -> None:
    every = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=8, logprobs=0)
    (all_four,) = llm.generate(PROMPT, every, use_tqdm=False)
    sums = {output.text: output.cumulative_logprob or 0.0 for output in all_four.outputs}
    best = SamplingParams(n=1, best_of=4, seed=3, temperature=1.0, max_tokens=8)
    (chosen,) = llm.generate(PROMPT, best, use_tqdm=False)
    assert len(chosen.outputs) == 1
    assert chosen.outputs[0].logprobs is None
    assert chosen.outputs[0].text == max(sums, key=lambda text: sums[text])
    assert chosen.outputs[0].cumulative_logprob == pytest.approx(max(sums.values()), abs=1e-3)
