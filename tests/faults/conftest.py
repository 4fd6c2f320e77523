"""A tiny model with adapters, and what 32 streams of all kinds give while nothing disturbs them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.real_processes import RealEngine, RealFrontend
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model
from tests.faults.mixed_streams import Answer, Case, MixedStreams, mixed_cases

ADAPTERS = ("one", "two")
MAX_TOKENS = 96
NUM_BLOCKS = 1024


@dataclass(frozen=True)
class TinyModel:
    """Where it is, and what the mixed streams are to give.

    Attributes:
        flags: serve it; of `engine-service` and of `pagewire serve`.
        cases: the mixed streams.
        expected: their undisturbed answers.
    """

    flags: tuple[str, ...]
    cases: list[Case]
    expected: dict[str, Answer]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tmp_path_factory.mktemp("tiny")
    reference = write_tiny_model(
        folder / "model", "llama-llama3-rope-tied", max_position_embeddings=1024
    )
    flags = [
        f"--model={folder / 'model'}",
        "--served-model-name=tiny",
        "--dtype=float32",
        # The C++ kernels may be built while a test runs, and would then be changed to.
        "--attention-backend=torch",
        f"--num-gpu-blocks-override={NUM_BLOCKS}",
        "--enable-lora",
        "--num-threads=1",
    ]
    for seed, name in enumerate(ADAPTERS, 1):
        write_tiny_adapter(folder / name, reference, seed=seed)
        flags.append(f"--lora-modules={name}={folder / name}")
    cases = mixed_cases(MAX_TOKENS, ADAPTERS)
    with RealEngine(*flags) as engine, RealFrontend(engine.target) as frontend:
        streams = MixedStreams(cases, frontend.http, frontend.grpc)
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
            expected = thread.submit(asyncio.run, streams.run()).result()
    for name, answer in expected.items():
        answer.assert_equals(answer, name)
        assert answer.resumptions == 0
        assert answer.num_tokens >= MAX_TOKENS / 2
    return TinyModel(tuple(flags), cases, expected)
