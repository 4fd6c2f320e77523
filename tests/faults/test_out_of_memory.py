"""A step for which the device has no memory, in a real model: it is tried again in smaller parts,
and only a request for which there is none even so fails."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.errors import PagewireError, ResourceExhaustedError
from pagewire_engine.engine import Engine
from pagewire_engine.executor.multi_process import MultiProcessExecutor
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.submission import Submission
from pagewire_engine.worker.exhaustion import telling_exhaustion
from pagewire_engine.worker.model_runner import ModelRunner
from tests.fakes.tiny_models import write_tiny_model
from tests.unit.engine.harness import settings, submission

CULPRIT = 201
REQUESTS = [
    submission("long", range(3, 63), max_tokens=8, prompt_logprobs=0, logprobs=0),
    *(
        submission(f"seeded{i}", range(40 + i, 58 + i), max_tokens=8, temperature=1.0, seed=i)
        for i in range(4)
    ),
    submission("group", range(90, 103), n=3, max_tokens=8, temperature=0.8, seed=9),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama-biases-untied-odd-heads")
    return folder


class Run:
    """What became of requests that ran together."""

    def __init__(self, model: Path, requests: list[Submission], *, overlaps: bool = False) -> None:
        config = EngineConfig(
            model=str(model),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=4,
            num_gpu_blocks_override=128,
        )
        executor = SingleProcessExecutor(config, resolve_model(config))
        engine = Engine(
            executor,
            eos_token_ids=[257],
            settings=settings(num_blocks=128, max_num_batched_tokens=256),
            overlaps_steps=overlaps,
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.prompt: list[Any] = []
        self.errors: dict[str, PagewireError] = {}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            outputs = engine.step()
            for output in outputs.sequences:
                key = output.request_id, output.sequence_index
                self.tokens.setdefault(key, []).extend(output.token_ids)
            for told in outputs.prompt_logprobs:
                assert told.start == 1 + len(self.prompt)
                self.prompt += told.positions
            self.errors |= {failure.request_id: failure.error for failure in outputs.failures}
        engine.queues.blocks.check()
        assert engine.queues.blocks.num_available_blocks == 128
        self.stats = engine.stats()
        engine.close()
        executor.shutdown()


def allocate_what_no_machine_has() -> None:
    torch.empty(1 << 60)


def raise_as_cuda_does() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raise_as_python_does() -> None:
    raise MemoryError


class SmallDevice:
    """Fails forward passes; counts them, by their tokens."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        fits: Callable[[torch.Tensor], bool],
        fail: Callable[[], None] = allocate_what_no_machine_has,
    ) -> None:
        self.sizes: list[int] = []
        self.failed: list[int] = []
        forward = ModelRunner._forward

        def limited(runner: ModelRunner, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.sizes.append(len(token_ids))
            if not fits(token_ids):
                self.failed.append(len(token_ids))
                fail()
            return forward(runner, token_ids, *rest)

        monkeypatch.setattr(ModelRunner, "_forward", limited)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Run:
    run = Run(model, REQUESTS)
    assert not run.errors
    assert run.stats.num_steps_out_of_memory == 0
    return run


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "fail", [allocate_what_no_machine_has, raise_as_cuda_does, raise_as_python_does]
)
def test_a_step_that_is_too_large_costs_nobody_anything(
    model: Path,
    undisturbed: Run,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[], None],
    overlaps: bool,
) -> None:
    # All prompts have 145 tokens, the longest alone 60.
    device = SmallDevice(monkeypatch, lambda token_ids: len(token_ids) <= 70, fail)
    run = Run(model, REQUESTS, overlaps=overlaps)
    assert device.failed
    assert run.stats.num_steps_out_of_memory == 1
    assert (run.tokens, run.errors) == (undisturbed.tokens, {})
    assert run.prompt == undisturbed.prompt


def test_a_prompt_that_is_too_much_at_once_is_computed_in_two(
    model: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SmallDevice(monkeypatch, lambda token_ids: len(token_ids) <= 40)
    run = Run(model, REQUESTS)
    assert 60 in device.failed  # alone, and all at once
    assert (run.tokens, run.errors) == (undisturbed.tokens, {})
    assert run.prompt == undisturbed.prompt


def test_only_the_culprit_fails_and_is_tried_once_more(
    model: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SmallDevice(monkeypatch, lambda token_ids: CULPRIT not in token_ids.tolist())
    culprit = submission("culprit", [3, *[CULPRIT] * 9], n=2, max_tokens=8)
    run = Run(model, [*REQUESTS[:3], culprit, *REQUESTS[3:]])
    assert run.tokens == undisturbed.tokens
    (error,) = run.errors.values()
    assert list(run.errors) == ["culprit"]
    assert isinstance(error, ResourceExhaustedError)
    assert "max_num_batched_tokens" in error.message
    # Alone, and then with half of it at a time: no more than that.
    assert device.failed[-2:] == [10, 5]
    assert run.stats.num_steps_out_of_memory == 1
    assert run.stats.num_requests_failed == 1


def test_a_worker_in_another_process_tells_it_as_what_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(model), device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8
    )
    # Python runs it when the worker's process begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n"
        "from pagewire_engine.worker.model_runner import ModelRunner\n"
        "ModelRunner._forward = lambda *_: torch.empty(1 << 60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    executor = MultiProcessExecutor(config, resolve_model(config))
    try:
        engine = Engine(executor, eos_token_ids=[], settings=settings(num_blocks=8))
        engine.add(submission("r", range(20)))
        failures = []
        while engine.has_work:
            failures += engine.step().failures
        assert [type(failure.error) for failure in failures] == [ResourceExhaustedError]
        engine.close()
    finally:
        executor.shutdown()


def test_what_a_failed_step_had_allocated_is_free_when_it_is_told() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(1000)
        kept.append(weakref.ref(activations))
        allocate_what_no_machine_has()

    with pytest.raises(ResourceExhaustedError) as caught, telling_exhaustion(torch.device("cpu")):
        step()
    assert caught.value  # it is still at hand, with whatever it refers to
    assert kept[0]() is None


def test_other_faults_of_a_step_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), telling_exhaustion(torch.device("cpu")):
        raise RuntimeError("shapes do not match")
