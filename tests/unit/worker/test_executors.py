"""A worker in another process is the same worker, and its death is told."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Literal

import pytest

from pagewire.config import EngineConfig
from pagewire.errors import (
    InternalError,
    InvalidArgumentError,
    PagewireError,
    UnavailableError,
)
from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire.pooling import PoolingParams
from pagewire.sampling_params import SamplingParams
from pagewire_engine.adapters.description import AdapterDescription, AdapterFolder
from pagewire_engine.executor import worker_process
from pagewire_engine.executor.base import Executor
from pagewire_engine.executor.frames import FrameKind, receive_frame, send_frame
from pagewire_engine.executor.multi_process import MultiProcessExecutor, WorkerDiedError
from pagewire_engine.executor.plain_data import decode_plan, decode_result, encode
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import resolve_model
from pagewire_engine.step import (
    NewSequence,
    PooledVector,
    PromptLogprobsChunk,
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
    WorkerInfo,
)
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import tiny_reference, write_tiny_bert

WAIT_S = 30.0
TINY_LLAMA = "llama-llama3-rope-tied"

PARAMS = SamplingParams(
    temperature=0.9, top_p=0.9, logit_bias={3: 2.5}, logprobs=3, prompt_logprobs=1, stop=("x",)
)


def _config(folder: Path, kv_cache_dtype: Literal["auto", "bfloat16"] = "auto") -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=40,
        num_threads=1,
        kv_cache_dtype=kv_cache_dtype,
    )


def _run(executor: Executor) -> list[StepResult]:
    """A prompt in two chunks beside another's decodes, a fork and a forgotten sequence."""
    new = [
        NewSequence(1, 0, 5, list(range(9)), [], PARAMS),
        NewSequence(2, 1, 5, list(range(20, 25)), [4], PARAMS),
    ]
    plans = [
        StepPlan(
            1,
            new,
            [
                ScheduledSequence(2, 0, 6, 0, [7, 8], (2,)),
                ScheduledSequence(1, 0, 5, 0, [3, 4], ()),
            ],
        ),
        StepPlan(
            2,
            [],
            [
                ScheduledSequence(2, 6, 1, 2, [], (2,)),
                ScheduledSequence(1, 5, 4, 2, [5], (1,)),
            ],
        ),
        StepPlan(
            3, [], [ScheduledSequence(1, 9, 1, 2, [6], (1,))], forgotten=[2], block_copies=[(5, 6)]
        ),
    ]
    return [executor.execute(plan) for plan in plans]


def test_a_worker_in_another_process_gives_identical_results(tiny_llama: Path) -> None:
    config = _config(tiny_llama)
    here = SingleProcessExecutor(config, resolve_model(config))
    there = MultiProcessExecutor(config, resolve_model(config))
    try:
        assert there.worker_pid != os.getpid()
        assert there.info() == here.info()
        results = _run(there)
        assert results == _run(here)
        assert results[1].prompt_logprobs
        with pytest.raises(InternalError, match="77"):
            there.execute(StepPlan(4, [], [ScheduledSequence(77, 0, 1, 0, [1], ())]))
        # An error is an answer: the worker lives on.
        assert there.execute(StepPlan(5)).step == 5
    finally:
        there.shutdown()
        there.shutdown()


@pytest.mark.slow
def test_an_encoder_in_another_process_gives_identical_vectors(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path)
    config = _config(tmp_path)
    here = SingleProcessExecutor(config, resolve_model(config))
    there = MultiProcessExecutor(config, resolve_model(config))
    new = [NewSequence(n, 0, 0, [2, n, 3], [], PARAMS, PoolingParams()) for n in (1, 2)]
    parts = [ScheduledSequence(n, 0, 3, 0, [], (n,)) for n in (1, 2)]
    try:
        assert there.info() == here.info()
        result = there.execute(StepPlan(1, new, parts))
        assert [vector.sequence_id for vector in result.vectors] == [1, 2]
        assert result == here.execute(StepPlan(1, new, parts))
    finally:
        there.shutdown()
        here.shutdown()


@pytest.mark.slow
def test_adapters_in_another_process_give_identical_results(
    tiny_llama: Path, tmp_path: Path
) -> None:
    write_tiny_adapter(tmp_path / "a", tiny_reference(TINY_LLAMA))
    config = _config(tiny_llama).model_copy(update={"enable_lora": True})
    here = SingleProcessExecutor(config, resolve_model(config))
    there = MultiProcessExecutor(config, resolve_model(config))
    prompts = [NewSequence(n, 0, 5, list(range(9)), [], PARAMS, adapter=n) for n in (0, 1)]
    parts = [ScheduledSequence(n, 0, 9, 0, [3 * n, 3 * n + 1, 3 * n + 2], (n,)) for n in (0, 1)]
    try:
        described = [
            each.load_adapter(1, AdapterFolder(str(tmp_path / "a"))) for each in (here, there)
        ]
        assert described[0] == described[1]
        results = [each.execute(StepPlan(1, prompts, parts)) for each in (here, there)]
        assert results[0] == results[1]
        base, adapted = results[0].sampled
        assert base.logprob != adapted.logprob
        assert there.adapter_memory() == here.adapter_memory()
        with pytest.raises(PagewireError, match=r"adapter_config\.json") as caught:
            there.load_adapter(2, AdapterFolder(str(tmp_path)))
        assert caught.value.field == "path"
        there.drop_adapter(1)
        assert there.adapter_memory().host == []
    finally:
        there.shutdown()
        here.shutdown()


class ReadingWorker:
    """Reads an adapter until as many steps were run meanwhile as it waits for."""

    def __init__(self) -> None:
        self.adapters = self
        self._steps = threading.Semaphore(0)

    def info(self) -> WorkerInfo:
        return WorkerInfo("x", "float32", "cpu", 10, 10, 1, 1, 0)

    def execute(self, plan: StepPlan) -> StepResult:
        self._steps.release()
        return StepResult(plan.step, [])

    def load(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        for _ in range(3):
            assert self._steps.acquire(timeout=WAIT_S), "steps wait for the adapter"
        return AdapterDescription("v", 1, 1.0, False, ["q_proj"], 8)


def test_steps_of_another_process_go_on_while_it_reads_an_adapter(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's issue 13698."""
    monkeypatch.setattr(worker_process, "load_worker", lambda *_: ReadingWorker())
    monkeypatch.setattr(worker_process, "adapters_of", lambda worker: worker)
    # It would be this process's, in which later tests look at what is logged.
    monkeypatch.setattr(worker_process, "configure_logging", lambda *_: None)
    (steps, their_steps), (adapters, their_adapters) = socket.socketpair(), socket.socketpair()

    def serve() -> None:
        with contextlib.suppress(EOFError, OSError):
            worker_process.serve(their_steps, their_adapters)

    serving = threading.Thread(target=serve)
    serving.start()
    config = _config(tiny_llama)
    setup = {
        "config": config.model_dump(mode="json"),
        "files": {"path": str(tiny_llama), "gguf": None, "name": "x"},
    }
    for each in (steps, adapters):
        each.settimeout(WAIT_S)
    with steps, adapters:
        send_frame(steps, FrameKind.INFO, encode(setup))
        assert receive_frame(steps)[0] is FrameKind.INFO
        asked = {"number": 1, "path": "a", "root": ""}
        send_frame(adapters, FrameKind.LOAD_ADAPTER, encode(asked))
        for number in range(3):
            send_frame(steps, FrameKind.PLAN, encode(StepPlan(number)))
            assert receive_frame(steps)[0] is FrameKind.RESULT
        assert receive_frame(adapters)[0] is FrameKind.RESULT
    serving.join(WAIT_S)


def _decode_after(executor: Executor, *steps: StepPlan, table: list[int]) -> SampledToken:
    """The second token of a prompt in blocks 3, 4 and 5, after `steps`, read through `table`."""
    prompt = NewSequence(1, 0, 5, list(range(9)), [], PARAMS)
    executor.execute(StepPlan(1, [prompt], [ScheduledSequence(1, 0, 9, 0, [3, 4, 5], (1,))]))
    for step in steps:
        executor.execute(step)
    decode = ScheduledSequence(1, 9, 1, 0, table, (1,))
    (token,) = executor.execute(StepPlan(9, [], [decode], forgotten=[2])).sampled
    executor.execute(StepPlan(10, forgotten=[1]))
    return token


@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype"),
    [
        (SingleProcessExecutor, "auto"),
        (SingleProcessExecutor, "bfloat16"),
        (MultiProcessExecutor, "bfloat16"),
    ],
)
def test_a_swapped_sequence_goes_on_bit_by_bit_as_if_it_had_stayed(
    kind: type[SingleProcessExecutor | MultiProcessExecutor],
    kv_cache_dtype: Literal["auto", "bfloat16"],
    tiny_llama: Path,
) -> None:
    config = _config(tiny_llama, kv_cache_dtype)
    executor = kind(config, resolve_model(config))
    # Another prompt takes its blocks in the very step that swaps it out.
    other = NewSequence(2, 0, 6, list(range(30, 40)), [], PARAMS)
    taken = StepPlan(
        2,
        [other],
        [ScheduledSequence(2, 0, 10, 0, [4, 3, 5], (2,))],
        swap_out=[(3, 7), (4, 0), (5, 1)],
    )
    # Back it comes into other blocks, and the last of them is copied on.
    back = StepPlan(3, swap_in=[(1, 22), (7, 20), (0, 21)], block_copies=[(22, 23)])
    try:
        stayed = _decode_after(executor, table=[3, 4, 5])
        assert stayed.logprobs is not None
        assert _decode_after(executor, taken, back, table=[20, 21, 23]) == stayed
        # The control: without its blocks it says something else.
        assert _decode_after(executor, taken, table=[3, 4, 5]) != stayed
    finally:
        executor.shutdown()


def test_a_killed_worker_is_a_typed_error(tiny_llama: Path) -> None:
    config = _config(tiny_llama)
    executor = MultiProcessExecutor(config, resolve_model(config))
    os.kill(executor.worker_pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"signal 9.*restart"):
        executor.execute(StepPlan(1))
    executor.shutdown()


def test_a_worker_that_cannot_load_says_why(tiny_llama: Path) -> None:
    config = _config(tiny_llama).model_copy(update={"max_model_len": 4096})
    with pytest.raises(InvalidArgumentError, match=r"max_model_len.*4096"):
        MultiProcessExecutor(config, resolve_model(config))


def test_an_executor_that_was_shut_down_refuses(tiny_llama: Path) -> None:
    config = _config(tiny_llama)
    executor = SingleProcessExecutor(config, resolve_model(config))
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(UnavailableError):
        executor.execute(StepPlan(1))


def test_plans_and_results_survive_the_boundary() -> None:
    plan = StepPlan(
        3,
        [
            NewSequence(1, 2, -5, [1, 2], [3], PARAMS, adapter=6),
            NewSequence(2, 0, 0, [1], [], SamplingParams(), PoolingParams(use_activation=True)),
        ],
        [ScheduledSequence(1, 2, 1, 0, [4], (1, 9))],
        forgotten=[8],
        swap_out=[(7, 0), (9, 3)],
        swap_in=[(3, 7)],
        block_copies=[(1, 2)],
    )
    assert decode_plan(encode(plan)) == plan
    position = PositionLogprobs(TokenLogprob(1, -0.1, 1), [TokenLogprob(1, -0.1, 1)])
    result = StepResult(
        3,
        [SampledToken(1, 4, -0.1, position), SampledToken(2, 5, math.nan)],
        [PromptLogprobsChunk(1, 1, [position])],
        [(7, "NaN")],
        vectors=[PooledVector(2, [0.1, -2.5e-8])],
    )
    decoded = decode_result(encode(result))
    assert math.isnan(decoded.sampled[1].logprob)
    assert decoded.sampled[0] == result.sampled[0]
    assert decoded.prompt_logprobs == result.prompt_logprobs
    assert decoded.failed == result.failed
    assert decoded.vectors == result.vectors
