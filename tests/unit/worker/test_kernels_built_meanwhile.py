"""An engine without the C++ kernels serves at once, and changes to them when they are built."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.model_files import resolve_model
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.worker import Worker
from pagewire_kernels import build, cpu
from tests.fakes.tiny_models import write_tiny_model

PROMPT = list(range(7, 29))
NUM_TOKENS = 24
# Waits for its leave, then "links" a library that was built before.
COMPILER = """#!/bin/sh
while [ ! -e {leave} ]; do sleep 0.02; done
while [ "$1" != "-o" ]; do shift; done
cp {library} "$2"
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    cpu.load_library.cache_clear()
    yield tmp_path
    cpu.load_library.cache_clear()


@pytest.fixture
def slow_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A compiler that ends once the file it returns exists."""
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    library, leave = build.build(), tmp_path / "leave"
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(leave=leave, library=library))
    compiler.chmod(0o755)
    request.getfixturevalue("empty_cache")
    monkeypatch.setenv("CXX", str(compiler))
    return leave


def new_worker(folder: Path, **settings: object) -> Worker:
    config = EngineConfig.model_validate(
        {"model": str(folder), "device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 16}
        | settings
    )
    return Worker(config, resolve_model(config))


def decode(worker: Worker, before_step: dict[int, Callable[[], None]] | None = None) -> list[int]:
    """Greedy tokens after PROMPT; `before_step` holds what to call before some of the steps."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    blocks = [3, 1, 5]
    steps = [ScheduledSequence(0, 0, len(PROMPT), 0, blocks, (0,))]
    steps += [
        ScheduledSequence(0, len(PROMPT) + i, 1, len(blocks), [], (0,))
        for i in range(NUM_TOKENS - 1)
    ]
    tokens = []
    for number, part in enumerate(steps):
        if before_step and number in before_step:
            before_step[number]()
        new = [NewSequence(0, 0, 0, PROMPT, [], params)] if number == 0 else []
        result = worker.execute(StepPlan(number, new, [part]))
        tokens += [token.token_id for token in result.sampled]
    worker.execute(StepPlan(99, forgotten=[0]))
    return tokens


def wait_for_build(worker: Worker) -> None:
    deadline = time.monotonic() + 60
    while not worker._kernels._build.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_torch_serves_until_the_kernels_are_built_in_the_middle_of_a_request(
    tmp_path: Path,
    slow_compiler: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, object],
) -> None:
    caplog.set_level(logging.INFO)
    write_tiny_model(tmp_path / "model", "llama-llama3-rope-tied")
    expected = decode(new_worker(tmp_path / "model", attention_backend="torch", **settings))
    worker = new_worker(tmp_path / "model", **settings)
    assert worker._kernels.attention.name == "torch"
    assert "built in the background" in caplog.text

    def finish_build() -> None:
        slow_compiler.touch()
        wait_for_build(worker)

    assert decode(worker, {NUM_TOKENS // 2: finish_build}) == expected
    assert worker._kernels.attention.name == "cpu"
    assert "serve from now on" in caplog.text
    assert decode(worker) == expected


def test_bfloat16_changes_kernels_in_the_middle_of_a_request(
    tmp_path: Path, slow_compiler: Path
) -> None:
    write_tiny_model(tmp_path / "model", "opt-norm-before")
    worker = new_worker(tmp_path / "model", dtype="bfloat16")

    def finish_build() -> None:
        slow_compiler.touch()
        wait_for_build(worker)

    assert len(decode(worker, {NUM_TOKENS // 2: finish_build})) == NUM_TOKENS
    assert worker._kernels.attention.name == "cpu"


def test_a_failing_build_leaves_torch_serving(
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'this compiler is broken' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    write_tiny_model(tmp_path / "model", "llama-llama3-rope-tied")
    worker = new_worker(tmp_path / "model")
    wait_for_build(worker)
    assert len(decode(worker)) == NUM_TOKENS
    assert worker._kernels.attention.name == "torch"
    assert caplog.text.count("this compiler is broken") == 1


def test_without_a_compiler_one_message_says_what_to_do(
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    write_tiny_model(tmp_path / "model", "llama-llama3-rope-tied")
    worker = new_worker(tmp_path / "model")
    assert len(decode(worker)) == NUM_TOKENS
    messages = [record.getMessage() for record in caplog.records if "kernels" in record.message]
    assert len(messages) == 1
    assert "plain torch serves" in messages[0]
    assert "python -m pagewire_kernels.build" in messages[0]


def test_heads_that_the_kernels_cannot_do_start_no_build(
    tmp_path: Path, slow_compiler: Path
) -> None:
    write_tiny_model(tmp_path / "model", "gpt2-untied-layer-scaled")  # heads of 12
    worker = new_worker(tmp_path / "model")
    assert worker._kernels._build is None
    assert len(decode(worker)) == NUM_TOKENS
