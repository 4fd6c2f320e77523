"""The runner of GPUs says what the reference says, whatever the scheduler does: steps launched
ahead of results, with graphs and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.beam_search_params import BeamSearchParams
from pagewire.config import EngineConfig
from pagewire_engine.engine import Engine
from pagewire_engine.executor.base import Executor
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.models.base import CausalLM
from pagewire_engine.outputs import SequenceOutput
from pagewire_engine.submission import Submission
from tests.fakes.device_executor import DeviceExecutor
from tests.fakes.engine_run import steps_to_end
from tests.fakes.step_driver import load
from tests.fakes.tiny_models import write_tiny_model
from tests.unit.engine.harness import settings, submission

REQUESTS = [
    submission("greedy", range(3, 20), max_tokens=8),
    submission("seeded", range(40, 51), max_tokens=6, temperature=1.0, seed=-5, top_k=9),
    submission(
        "penalised twins",
        range(90, 103),
        n=2,
        max_tokens=6,
        temperature=0.8,
        seed=2**40 + 3,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        top_p=0.9,
    ),
    submission("short", [7], max_tokens=6, min_tokens=4, ignore_eos=False, min_p=0.01),
    submission("told", range(60, 69), max_tokens=4, logprobs=2, prompt_logprobs=1),
    submission("biased", range(70, 75), max_tokens=4, logit_bias={5: 3.0, 9: -100.0}, logprobs=0),
    Submission(
        "beams",
        list(range(110, 118)),
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True).as_sampling_params(),
    ),
]
GRAPHS = (2, 8)
LAYERS = (4, 16, 64)


class Answers:
    """What each sequence was told, by request and index."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[Any]] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}

    def take(self, output: SequenceOutput) -> None:
        key = (output.request_id, output.sequence_index)
        self.tokens.setdefault(key, []).extend(output.token_ids)
        if output.logprobs:
            self.logprobs.setdefault(key, []).extend(output.logprobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen2-window-in-upper-layers")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load(folder)[0]


def run(
    executor: Executor,
    requests: list[Submission],
    *,
    overlaps: bool = True,
    num_blocks: int = 96,
    aborts: dict[int, str] | None = None,
    **limits: Any,
) -> tuple[Answers, Engine]:
    """Runs all requests together; aborts some after so many steps."""
    engine = Engine(
        executor,
        eos_token_ids=[257],
        settings=settings(num_blocks=num_blocks, max_num_seqs=8, max_model_len=64, **limits),
        overlaps_steps=overlaps,
    )
    answers = Answers()
    for request in requests:
        engine.add(request)
    for step, outputs in enumerate(steps_to_end(engine), start=1):
        for output in outputs.sequences:
            answers.take(output)
        for told in outputs.prompt_logprobs:
            answers.prompt_logprobs.setdefault(told.request_id, []).extend(told.positions)
        if aborts and step in aborts:
            engine.abort(aborts[step])
    engine.queues.blocks.check()
    engine.close()
    return answers, engine


@pytest.fixture(scope="module")
def reference(folder: Path) -> Answers:
    """What the reference runner says, step after step."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        attention_backend="torch",
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=96,
        max_model_len=64,
    )
    executor = SingleProcessExecutor(config, resolve_model(config))
    return run(executor, REQUESTS, overlaps=False)[0]


def close(ours: list[Any], theirs: list[Any]) -> None:
    """Positions are told alike, up to the last bits of the log probabilities."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        tokens = [one.token, *one.top], [other.token, *other.top]
        assert [t.token_id for t in tokens[0]] == [t.token_id for t in tokens[1]]
        assert [t.rank for t in tokens[0]] == [t.rank for t in tokens[1]]
        assert [t.logprob for t in tokens[0]] == pytest.approx(
            [t.logprob for t in tokens[1]], abs=1e-4
        )


def same(ours: Answers, reference: Answers, requests: list[Submission] = REQUESTS) -> None:
    for request in requests:
        name = request.request_id
        for index in range(request.sampling_params.n):
            key = (name, index)
            assert ours.tokens[key] == reference.tokens[key], key
            close(ours.logprobs.get(key, []), reference.logprobs.get(key, []))
        close(ours.prompt_logprobs.get(name, []), reference.prompt_logprobs.get(name, []))


def test_together_without_graphs(model: CausalLM, reference: Answers) -> None:
    executor = DeviceExecutor(model, num_blocks=96)
    answers, _ = run(executor, REQUESTS)
    same(answers, reference)
    assert executor.runner.num_replays == 0


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_in_chunks(model: CausalLM, reference: Answers, layers: tuple[int, ...]) -> None:
    executor = DeviceExecutor(model, num_blocks=96, graph_sizes=GRAPHS, layer_sizes=layers)
    answers, engine = run(executor, REQUESTS, max_num_batched_tokens=9)
    same(answers, reference)
    assert engine.stats().num_prefill_chunks > len(REQUESTS)
    assert (executor.runner.num_layer_replays > 0) is bool(layers)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(model: CausalLM, reference: Answers, mode: str) -> None:
    cpu_blocks = 24 if mode == "swap" else 0
    executor = DeviceExecutor(
        model,
        num_blocks=14,
        num_cpu_blocks=cpu_blocks,
        graph_sizes=GRAPHS,
        layer_sizes=LAYERS,
    )
    answers, engine = run(
        executor,
        REQUESTS[:4],
        num_blocks=14,
        num_cpu_blocks=cpu_blocks,
        max_num_batched_tokens=24,
        preemption_mode=mode,
    )
    same(answers, reference, REQUESTS[:4])
    assert engine.stats().num_preemptions > 0
    assert (engine.queues.num_swaps > 0) is (mode == "swap")
    assert executor.runner.num_replays > 0


def test_aborted_in_flight(model: CausalLM, reference: Answers) -> None:
    gone = [
        submission(f"gone {number}", range(150 + number, 158 + number), max_tokens=30)
        for number in range(3)
    ]
    late = [replace(REQUESTS[1], request_id="late")]
    executor = DeviceExecutor(model, num_blocks=96, graph_sizes=GRAPHS)
    aborts = {4: "gone 0", 5: "gone 1", 7: "gone 2"}
    answers, _ = run(executor, [*gone, *REQUESTS[:2], *late], aborts=aborts)
    same(answers, reference, REQUESTS[:2])
    assert answers.tokens["late", 0] == reference.tokens["seeded", 0]


def test_contexts_beyond_the_captured_length_are_launched_one_by_one(
    model: CausalLM, reference: Answers
) -> None:
    executor = DeviceExecutor(
        model, num_blocks=96, graph_sizes=GRAPHS, layer_sizes=LAYERS, max_context=20
    )
    answers, _ = run(executor, REQUESTS[:1])
    assert answers.tokens["greedy", 0] == reference.tokens["greedy", 0]
    # Of contexts 18 to 24, three are no longer than 20.
    assert executor.runner.num_replays == 3
    assert executor.runner.num_layer_replays == 1  # the prompt of 17


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is sent to the device."""
    from pagewire_engine.worker.staging import StepArray, Uploads

    sizes: list[int] = []
    send = Uploads.send

    def counting(self: Uploads, array: StepArray) -> torch.Tensor:
        sizes.append(array.size)
        return send(self, array)

    monkeypatch.setattr(Uploads, "send", counting)
    return sizes


def test_a_decode_step_sends_nothing_but_new_blocks(model: CausalLM, uploads: list[int]) -> None:
    executor = DeviceExecutor(model, num_blocks=96, graph_sizes=GRAPHS)
    run(executor, [submission("a", range(6), max_tokens=14)])
    # The prompt, the first decode's rows, and blocks for tokens 9, 13 and 17.
    assert len(uploads) == 2 + 3
