"""How many prompts `LLM` hands to its engine at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.config import EngineConfig
from pagewire_frontend import llm_model


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({}, 512),
        ({"max_num_seqs": 1024}, 2048),
        ({"max_num_seqs": 4096, "max_waiting_requests": 5000}, 5000),
        ({"max_waiting_requests": 3}, 3),
    ],
)
def test_enough_to_keep_the_batch_full_and_no_more_than_may_wait(
    settings: dict[str, Any], number: int
) -> None:
    assert llm_model.most_in_flight(EngineConfig(model="m", **settings)) == number


def test_more_prompts_than_may_wait_are_all_answered(tiny_llama: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "block_size": 4}
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + number, 4, 5]} for number in range(30)]
    with LLM(str(tiny_llama), max_num_seqs=2, max_waiting_requests=3, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids[0] for output in outputs] == list(range(3, 33))
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
