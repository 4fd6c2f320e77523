"""`LLM` with a real model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    settings = {"max_model_len": 1024, "kv_cache_memory": 64 * 2**20, "num_threads": 1}
    with LLM(model=str(smollm2_path), **settings) as llm:
        yield llm


def test_a_greedy_chat_answers_paris(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    (output,) = llm.chat(QUESTION, greedy, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


def test_texts_ids_and_mixed_lists_give_the_same_as_each_alone(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.get_tokenizer().encode("The capital of France is")
    prompts = ["The capital of France is", {"prompt_token_ids": ids}, "Water boils at", "1, 2, 3,"]
    together = llm.generate(prompts, greedy, use_tqdm=False)
    texts = [output.outputs[0].text for output in together]
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
    alone = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in prompts[2:]]
    assert texts[2:] == [output.outputs[0].text for output in alone]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop="Paris")
    (output,) = llm.chat(QUESTION, params, use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "Paris")
    assert answer.text == "The capital of France is "
    # Nothing of it runs on in the engine: the next request has the same answer.
    (again,) = llm.chat(QUESTION, params, use_tqdm=False)
    assert again.outputs[0].token_ids == answer.token_ids


def test_a_seed_gives_the_same_texts_alone_and_with_others(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=8, n=2)
    other = SamplingParams(temperature=1.0, seed=8, max_tokens=12)
    (alone,) = llm.generate("Once upon a time", seeded, use_tqdm=False)
    texts = [answer.text for answer in alone.outputs]
    assert texts[0] != texts[1]
    together = llm.generate(
        ["Something else", "Once upon a time", "And more"], [other, seeded, other], use_tqdm=False
    )
    assert [answer.text for answer in together[1].outputs] == texts


def test_logprobs_of_prompt_and_answer_have_their_tokens_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    assert answer.logprobs[0][answer.token_ids[0]].decoded_token == " Paris"
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[i].logprob for entry, i in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
