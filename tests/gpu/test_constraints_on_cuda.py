"""Constrained outputs on CUDA are those of the CPU, however they are computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire_engine.build import BuiltEngine, build_engine
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.submission import Submission
from tests.fakes.engine_run import Answers, answers_to
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
    "preempted": {"num_gpu_blocks_override": 20, "preemption_mode": "recompute"},
    "swapped": {"num_gpu_blocks_override": 20, "preemption_mode": "swap"},
}


@contextmanager
def _engine(folder: Path, device: str, **changes: Any) -> Iterator[BuiltEngine]:
    config = EngineConfig(model=str(folder), device=device, **{**SETTINGS, **changes})
    built = build_engine(config, lambda line: None)
    yield built
    built.shutdown()


def _answers(engine: Engine) -> Answers:
    """What an engine says to everybody at once."""
    requests = [
        Submission(
            f"{name} {length}",
            [(i * i + 3 * i * length + number) % 256 for i in range(length)],
            params,
        )
        for number, (name, params) in enumerate(ALL_PARAMS.items())
        for length in (4, 33)
    ]
    return answers_to(engine, requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama-llama3-rope-tied")
    return folder


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> Answers:
    with _engine(folder, "cpu") as built:
        return _answers(built.engine)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("way", WAYS)
def test_constrained_outputs_are_those_of_the_cpu(way: str, folder: Path, on_cpu: Answers) -> None:
    changes = WAYS[way]
    with _engine(folder, "cuda", **changes) as built:
        assert _answers(built.engine) == on_cpu
        stats, executor = built.engine.stats(), built.executor
        assert isinstance(executor, SingleProcessExecutor)
        assert executor._worker is not None
        num_replays = getattr(executor._worker._runner, "num_replays", 0)
        num_swaps = built.engine.queues.num_swaps
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in changes)
    assert (num_swaps > 0) == (way == "swapped")
    if way == "in chunks":
        assert stats.num_prefill_chunks > 2 * len(ALL_PARAMS)
    assert (num_replays > 0) == (way not in ("launch by launch", "by torch"))
