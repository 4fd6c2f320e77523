"""Constrained outputs on CUDA are those of the CPU, however they are computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.build import BuiltEngine, build_engine
from pagewire_engine.submission import Submission
from tests.fakes.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -50, "maximum": 5000},
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
    },
    "required": ["x", "name", "tags"],
    "additionalProperties": False,
}
STORY = {
    "type": "object",
    "properties": {"story": {"type": "string"}, "more": {"type": "array"}},
    "required": ["story", "more"],
}
WORDS = "[a-f]{3,20}(-[0-9]{2}){1,6}"
EOS = 257
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 24,
    "seed": 1,
}


def _params(constraint: StructuredOutput | None, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 60, **changes}, structured_output=constraint
    )


ALL_PARAMS = {
    "point": _params(StructuredOutput(json_schema=json.dumps(POINT))),
    "hot point": _params(StructuredOutput(json_schema=json.dumps(POINT)), temperature=3.0, seed=5),
    # Neither would come to its end by itself.
    "story": _params(StructuredOutput(json_schema=json.dumps(STORY)), n=2, temperature=2.0, seed=9),
    "words": _params(
        StructuredOutput(regex=WORDS), n=2, temperature=3.0, seed=-3, presence_penalty=0.5
    ),
    "free": _params(None, temperature=1.0, seed=8, logprobs=2),
}
WAYS: dict[str, dict[str, Any]] = {
    "as graphs": {},
    "launch by launch": {"enforce_eager": True},
    "by torch": {"attention_backend": "torch"},
    "in chunks": {"max_num_batched_tokens": 24},
    "preempted": {"num_gpu_blocks_override": 20},
    "swapped": {"num_gpu_blocks_override": 20, "preemption_mode": "swap"},
}


def _answers(
    folder: Path, device: str, **changes: Any
) -> tuple[dict[tuple[str, int], list[int]], int]:
    """What an engine of its own says to everybody at once, and how often it preempted."""
    config = EngineConfig(model=str(folder), device=device, **{**SETTINGS, **changes})
    built = build_engine(config, lambda line: None)
    try:
        return _run(built)
    finally:
        built.shutdown()


def _run(built: BuiltEngine) -> tuple[dict[tuple[str, int], list[int]], int]:
    engine = built.engine
    for number, (name, params) in enumerate(ALL_PARAMS.items()):
        for length in (4, 33):
            prompt = [(i * i + 3 * i * length + number) % 256 for i in range(length)]
            engine.add(Submission(f"{name} {length}", prompt, params))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        for output in outputs.sequences:
            key = (output.request_id, output.sequence_index)
            tokens.setdefault(key, []).extend(output.token_ids)
    return tokens, engine.stats().num_preemptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama-llama3-rope-tied")
    return folder


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> dict[tuple[str, int], list[int]]:
    return _answers(folder, "cpu")[0]


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("way", WAYS)
def test_constrained_outputs_are_those_of_the_cpu(
    way: str, folder: Path, on_cpu: dict[tuple[str, int], list[int]]
) -> None:
    told, num_preemptions = _answers(folder, "cuda", **WAYS[way])
    assert told == on_cpu
    assert (num_preemptions > 0) == ("num_gpu_blocks_override" in WAYS[way])


def test_what_ends_keeps_to_its_constraint(
    folder: Path, on_cpu: dict[tuple[str, int], list[int]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_ended = 0
    for (name, _), token_ids in on_cpu.items():
        if name.startswith("free") or token_ids[-1] != EOS:
            continue
        num_ended += 1
        text = tokenizer.decode(token_ids[:-1])
        if name.startswith("words"):
            assert re.fullmatch(WORDS, text)
        elif name.startswith("story"):
            assert {"story", "more"} <= set(json.loads(text))
        else:
            point = json.loads(text)
            assert -50 <= point["x"] <= 5000
            assert len(point["name"]) <= 6
            assert len(set(point["tags"])) == len(point["tags"])
    assert num_ended >= 6
