"""DESIGN invariant 4 with attention, sampler and cache in place of the fake executor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.submission import SequencePast, Submission
from tests.fakes.engine_run import Answers, answers_to
from tests.fakes.tiny_models import write_tiny_model
from tests.unit.engine.harness import settings, submission

REQUESTS = [
    submission("greedy", range(3, 20), max_tokens=14),
    submission("seeded", range(40, 51), max_tokens=14, temperature=1.0, seed=5),
    submission(
        "penalised twins",
        range(90, 103),
        n=2,
        max_tokens=12,
        temperature=0.8,
        seed=-3,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        top_p=0.9,
    ),
    submission("short", [7], max_tokens=14, min_tokens=5, ignore_eos=False),
]


@pytest.fixture(
    scope="module", params=["llama-biases-untied-odd-heads", "qwen2-window-in-upper-layers"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, request.param)
    return folder


def answers(
    model: Path,
    requests: list[Submission],
    *,
    num_blocks: int = 64,
    first: list[Submission] | None = None,
    overlaps_steps: bool = False,
    **limits: Any,
) -> tuple[Answers, Engine]:
    """Runs all requests together, after others that were there `first`."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        swap_space=1 << 22,
    )
    executor = SingleProcessExecutor(config, resolve_model(config))
    engine = Engine(
        executor,
        eos_token_ids=[257],
        settings=settings(num_blocks=num_blocks, **limits),
        overlaps_steps=overlaps_steps,
    )
    answers_to(engine, first or ())
    told = answers_to(engine, requests)
    engine.queues.blocks.check()
    engine.close()
    executor.shutdown()
    return told, engine


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    """Each request by itself, its prompt in one step."""
    return {r.request_id: answers(model, [r])[0][r.request_id] for r in REQUESTS}


def test_together(model: Path, alone: Answers) -> None:
    told, engine = answers(model, REQUESTS)
    assert told == alone
    assert engine.stats().num_prefill_chunks == len(REQUESTS)
    # All prompts in the first step; the others are as many as the longest answer needs.
    assert engine.stats().step == max(len(tokens) for each in told.values() for tokens in each)


def test_in_chunks(model: Path, alone: Answers) -> None:
    told, engine = answers(model, REQUESTS, max_num_batched_tokens=5)
    assert told == alone
    assert engine.stats().num_prefill_chunks > 2 * len(REQUESTS)


def test_preempted(model: Path, alone: Answers) -> None:
    told, engine = answers(model, REQUESTS, num_blocks=14, max_num_batched_tokens=24)
    assert told == alone
    assert engine.stats().num_preemptions > 0
    assert engine.queues.num_swaps == 0


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_swapped(model: Path, alone: Answers, mode: str) -> None:
    told, engine = answers(
        model,
        # The latest is preempted first: one with two sequences.
        sorted(REQUESTS, key=lambda request: request.sampling_params.n),
        num_blocks=14,
        max_num_batched_tokens=24,
        num_cpu_blocks=16,
        preemption_mode=mode,
    )
    assert told == alone
    assert engine.queues.num_swaps > 0


@pytest.mark.parametrize("budget", [5, 64])
def test_cached(model: Path, alone: Answers, budget: int) -> None:
    first = [replace(request, request_id=f"{request.request_id} first") for request in REQUESTS]
    told, engine = answers(model, REQUESTS, first=first, max_num_batched_tokens=budget)
    assert told == alone
    # 16 of 17, 8 of 11 and 12 of 13 tokens are in full blocks.
    assert engine.queues.blocks.num_tokens_hit >= 16 + 8 + 12


@pytest.mark.parametrize("num_past", [1, 6])
def test_resumed_in_another_engine(model: Path, alone: Answers, num_past: int) -> None:
    requests = [
        replace(
            request,
            past=[
                SequencePast(index, tokens[:num_past])
                for index, tokens in enumerate(alone[request.request_id])
            ],
        )
        for request in REQUESTS
    ]
    told, engine = answers(model, requests, max_num_batched_tokens=16)
    assert told == alone
    num_tokens = sum(len(tokens) for sequences in alone.values() for tokens in sequences)
    assert engine.stats().num_generation_tokens == num_tokens - 5 * num_past


@pytest.mark.parametrize(
    ("limits", "counter"),
    [
        ({}, "num_overlapped_steps"),
        ({"max_num_batched_tokens": 5}, "num_prefill_chunks"),
        ({"num_blocks": 14, "preemption_mode": "recompute"}, "num_preemptions"),
        ({"num_blocks": 14, "num_cpu_blocks": 16, "preemption_mode": "swap"}, "num_swaps"),
    ],
    ids=["roomy", "in chunks", "preempted", "swapped"],
)
def test_while_steps_overlap(
    model: Path, alone: Answers, limits: dict[str, Any], counter: str
) -> None:
    told, engine = answers(model, REQUESTS, overlaps_steps=True, **limits)
    assert told == alone
    stats = engine.stats()
    assert stats.num_overlapped_steps > 5
    assert getattr(stats, counter) > (2 * len(REQUESTS) if counter == "num_prefill_chunks" else 0)


def test_of_steps_that_do_not_overlap_none_is_counted(model: Path) -> None:
    _, engine = answers(model, REQUESTS[:1])
    assert engine.stats().num_overlapped_steps == 0
