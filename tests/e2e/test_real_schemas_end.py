"""Schemas of packages that are installed, answered by the small real model within `max_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from pagewire import LLM, SamplingParams
from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import MAX_CONSTRAINT_BYTES, StructuredOutput
from pagewire_frontend.model_download import smollm2_path
from tests.unit.engine.test_real_schemas import sample

NUM_SCHEMAS = 30
MAX_TOKENS = 160


@dataclass(frozen=True)
class Asked:
    """A model, and the schemas that it takes, each with what its answers are asked with."""

    llm: LLM
    kept: list[tuple[dict[str, Any], SamplingParams]]


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    llm = LLM(str(smollm2_path()), max_num_seqs=NUM_SCHEMAS)
    kept: list[tuple[dict[str, Any], SamplingParams]] = []
    for seed, (_, schema) in enumerate(sample(NUM_SCHEMAS)):
        if len(json.dumps(schema)) > MAX_CONSTRAINT_BYTES:
            continue
        params = SamplingParams(
            seed=seed,
            max_tokens=1,
            structured_output=StructuredOutput(json_schema=json.dumps(schema)),
        )
        try:
            llm.generate("JSON:", params, use_tqdm=False)
        except InvalidArgumentError:
            continue
        kept.append((schema, replace(params, max_tokens=MAX_TOKENS)))
    yield Asked(llm, kept)
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_at_most_a_tenth_is_cut_and_what_ends_is_valid(asked: Asked, temperature: float) -> None:
    kept = asked.kept
    longer = [replace(params, temperature=temperature) for _, params in kept]
    prompts = ["An example as JSON: "] * len(kept)
    outputs = asked.llm.generate(prompts, longer, use_tqdm=False)
    num_cut = 0
    for (schema, _), output in zip(kept, outputs, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason == "length":
            num_cut += 1
            continue
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind(schema).validate(json.loads(answer.text))
    assert len(kept) >= NUM_SCHEMAS * 9 // 10
    assert num_cut <= len(kept) // 10
