"""Steps launched ahead on CUDA, decodes as graphs: the answers of the reference, and no waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.build import assemble_engine
from pagewire_engine.engine import Engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.submission import Submission
from pagewire_engine.worker.worker import Worker
from tests.bench.gpu.workloads import MODELS
from tests.fakes.engine_run import Answers, answers_to
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NEW_TOKENS = 24
EVERY_KIND = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(
        n=2,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        seed=-11,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
    ),
    SamplingParams(
        temperature=0.7,
        min_p=0.02,
        seed=5,
        logit_bias={7: 2.0},
        min_tokens=9,
        stop_token_ids=(3,),
        logprobs=2,
        max_tokens=NEW_TOKENS,
    ),
]


@dataclass
class Told:
    """What an engine told, and how it came to it."""

    tokens: Answers = field(default_factory=dict)
    num_replays: int = 0
    num_layer_replays: int = 0
    engine: Engine | None = None


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def answers(
    folder: Path, requests: list[Submission], *, again: bool = False, **settings: Any
) -> Told:
    """What an engine of its own says to all requests; `again`: asked twice, told the second."""
    config = EngineConfig(model=str(folder), device="cuda", skip_tokenizer_init=True, **settings)
    files = resolve_model(config)
    executor = SingleProcessExecutor(config, files)
    engine = assemble_engine(executor, config, load_description(files, config).eos_token_ids)
    told = Told(engine=engine)
    for _ in range(2 if again else 1):
        told.tokens = answers_to(engine, requests)
    assert executor._worker is not None
    told.num_replays = getattr(executor._worker._runner, "num_replays", 0)
    told.num_layer_replays = getattr(executor._worker._runner, "num_layer_replays", 0)
    engine.close()
    executor.shutdown()
    return told


def _requests(vocab_size: int) -> list[Submission]:
    return [
        Submission(
            f"{kind}-{length}",
            [(i * i + 3 * i * length + kind) % vocab_size for i in range(length)],
            params,
        )
        for kind, params in enumerate(EVERY_KIND)
        for length in (1, 5, 21, 34)
    ]


TINY = {"dtype": "float32", "block_size": 16, "max_model_len": 96, "max_num_seqs": 24}


@pytest.mark.parametrize("name", ["llama-llama3-rope-tied", "qwen2-window-in-upper-layers"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_way_to_compute_tells_what_the_reference_tells(
    name: str, enforce_eager: bool, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, name)
    requests = _requests(VOCAB_SIZE)
    shared = {**TINY, "num_gpu_blocks_override": 400}
    expected = answers(tmp_path, requests, attention_backend="torch", **shared)
    assert expected.num_replays == 0
    ours = {**shared, "attention_backend": "triton", "enforce_eager": enforce_eager}
    ways: dict[str, dict[str, Any]] = {
        "together": {},
        "in chunks": {"max_num_batched_tokens": 32},
        "cached": {"again": True},
        "preempted": {"num_gpu_blocks_override": 30},
        "swapped": {"num_gpu_blocks_override": 30, "preemption_mode": "swap"},
    }
    for way, changes in ways.items():
        told = answers(tmp_path, requests, **{**ours, **changes})
        assert told.tokens == expected.tokens, way
        assert (told.num_replays > 0) is not enforce_eager, way
        assert (told.num_layer_replays > 0) is not enforce_eager, way
        assert told.engine is not None
        if "num_gpu_blocks_override" in changes:
            assert told.engine.stats().num_preemptions > 0


def test_contexts_beyond_the_captured_length_are_launched_one_by_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    request = Submission("a", list(range(20)), EVERY_KIND[0])
    settings = {**TINY, "num_gpu_blocks_override": 40, "attention_backend": "triton"}
    expected = answers(tmp_path, [request], **settings)
    told = answers(tmp_path, [request], max_seq_len_to_capture=30, **settings)
    assert told.tokens == expected.tokens
    assert expected.num_replays == NEW_TOKENS - 1
    assert told.num_replays == 10


BIG: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 600,
    "skip_tokenizer_init": True,
    "swap_space": 0,
}


def _worker(**settings: Any) -> Worker:
    config = EngineConfig(model=str(MODELS["1b"].folder), device="cuda", **{**BIG, **settings})
    return Worker(config, resolve_model(config))


@contextmanager
def recorded_logits(worker: Worker) -> Iterator[list[torch.Tensor]]:
    """The logits of each step."""
    runner: Any = worker._runner
    seen: list[torch.Tensor] = []
    finish = runner._finish

    def recording(step: Any, logits: torch.Tensor, *rest: Any) -> None:
        seen.append(logits.float().clone())
        finish(step, logits, *rest)

    runner._finish = recording
    yield seen
    runner._finish = finish


def _decode_of(num_seqs: int) -> tuple[list[NewSequence], list[StepPlan]]:
    """Prompts in two chunks, then a decode of all: the same tokens, whatever is sampled."""
    generator = torch.Generator().manual_seed(0)
    new, first, second, decode = [], [], [], []
    for i in range(num_seqs):
        length = 40 + 9 * i
        prompt = torch.randint(10, 100_000, (length,), generator=generator).tolist()
        new.append(NewSequence(i, 0, i, prompt[:-1], prompt[-1:], EVERY_KIND[0]))
        blocks = list(range(32 * i, 32 * i - (-length // 16)))
        first.append(ScheduledSequence(i, 0, 33, 0, blocks[:3], ()))
        second.append(ScheduledSequence(i, 33, length - 34, 3, blocks[3:], ()))
        decode.append(ScheduledSequence(i, length - 1, 1, len(blocks), [], (i,)))
    plans = [StepPlan(1, new, first), StepPlan(2, [], second), StepPlan(3, [], decode)]
    return new, plans


# Two ways to compute round at different places: one may be so many times as far from what is exact.
TIMES_AS_FAR = 1.5


def _reference_logits(worker: Worker, plans: list[StepPlan]) -> torch.Tensor:
    """Logits of the last step, by the reference's runner."""
    heads: list[torch.Tensor] = []
    handle = worker._model.lm_head.register_forward_hook(
        lambda module, args, output: heads.append(output.float().clone())
    )
    for plan in plans:
        worker.execute(plan)
    handle.remove()
    return heads[-1]


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Between logits [N, V], relative to their size."""
    return float((found - exact).norm() / exact.norm())


def test_logits_of_a_graph_are_as_near_to_fp32_as_the_reference_in_bf16() -> None:
    """Neither is near to the other in bf16: each rounds all it keeps to 8 bits, in other places.
    Both must be near to the same weights in fp32."""
    num_seqs = 11
    _, plans = _decode_of(num_seqs)
    logits: dict[str, torch.Tensor] = {}
    for way, settings in {
        "graph": {"attention_backend": "triton"},
        "eager": {"attention_backend": "triton", "enforce_eager": True},
    }.items():
        worker = _worker(dtype="bfloat16", **settings)
        with recorded_logits(worker) as seen:
            for plan in plans:
                worker.execute(plan)
        assert len(seen) == 1
        logits[way] = seen[0][:num_seqs]  # the others are of padding
        assert worker._runner.num_replays == int(way == "graph")  # type: ignore[union-attr]
        del worker
        torch.cuda.empty_cache()
    reference = _worker(dtype="bfloat16", attention_backend="torch")
    rounded = _reference_logits(reference, plans)
    exact_worker = _worker(dtype="float32", attention_backend="torch")
    exact_worker._model.load_state_dict(reference._model.state_dict())
    exact = _reference_logits(exact_worker, plans)
    off = {way: _distance(found, exact) for way, found in logits.items()}
    allowed = TIMES_AS_FAR * _distance(rounded, exact)
    # The reference is no measure if it computed something else: bf16 costs a model this deep a few
    # per cent, and unrelated logits are 1.4 apart.
    assert allowed < 0.3, f"the reference in bf16 is {allowed / TIMES_AS_FAR:.2e} off"
    assert max(off.values()) <= allowed, f"{off} off, {allowed:.2e} allowed"
    for way, found in logits.items():
        rows = [_distance(*pair) for pair in zip(found, exact, strict=True)]
        assert max(rows) <= 2 * allowed, f"{way}: rows are {rows} off, {2 * allowed:.2e} allowed"


def test_tokens_of_1b_in_fp32_are_those_of_the_reference() -> None:
    requests = [
        Submission(str(n), [(7 * n + 13 * i) % 100_000 for i in range(20 + 30 * n)], params)
        for n, params in enumerate([EVERY_KIND[0]] * 5 + EVERY_KIND[1:])
    ]
    folder = MODELS["1b"].folder
    shared = {
        **{name: value for name, value in BIG.items() if name != "skip_tokenizer_init"},
        "dtype": "float32",
        "max_num_batched_tokens": 128,
    }
    expected = answers(folder, requests, attention_backend="torch", **shared)
    for enforce_eager in (False, True):
        told = answers(
            folder, requests, attention_backend="triton", enforce_eager=enforce_eager, **shared
        )
        assert told.tokens == expected.tokens
        assert (told.num_replays > 0) is not enforce_eager
        assert (told.num_layer_replays > 0) is not enforce_eager


def test_no_launch_waits_for_the_device(tmp_path: Path) -> None:
    """With penalties, biases, filters and log probabilities; mixed steps and decodes."""
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        skip_tokenizer_init=True,
        attention_backend="triton",
        num_gpu_blocks_override=400,
        **TINY,
    )
    files = resolve_model(config)
    executor = SingleProcessExecutor(config, files)
    engine = assemble_engine(executor, config, load_description(files, config).eos_token_ids)
    answers_to(engine, _requests(VOCAB_SIZE))  # compiles what is not yet
    launch = executor.launch

    def strict_launch(plan: StepPlan) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.launch = strict_launch  # type: ignore[method-assign]
    answers_to(engine, _requests(VOCAB_SIZE))
    engine.close()
    executor.shutdown()


def test_graphs_stay_within_the_memory_they_were_measured_to_take() -> None:
    torch.cuda.empty_cache()
    share = 0.25
    free_before, total = torch.cuda.mem_get_info()
    worker = _worker(
        dtype="bfloat16",
        attention_backend="triton",
        num_gpu_blocks_override=None,
        gpu_memory_utilization=share,
        max_num_seqs=256,
        max_model_len=8192,
    )
    _, plans = _decode_of(16)
    for plan in plans:
        worker.execute(plan)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    assert total - free < share * total + 2**28
    # And they were not guessed to take far too much.
    assert total - free > 0.85 * share * total
    assert free < free_before
