"""Times sampling's kernels on a CUDA device beside what reading the logits once takes.

Usage: python -m tests.bench.gpu_kernels.sampling [--vocab-size N] [--rows N ...] [--out FILE]

One line of JSON for each number of rows, kind of sampling and kind of logits: microseconds a call
inside a CUDA graph, in turn on copies of the logits that together exceed the second-level cache;
the floor, bytes of logits at 2.98 TB/s; and time over floor. Flat logits are those of random
weights (deviation 1), peaked ones deviate by 4.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels.gpu.sampling import (
    Epilogue,
    SamplingColumns,
    SamplingConfig,
    SamplingWorkspace,
    sample,
)
from pagewire_kernels.gpu.sampling_logprobs import raw_logprobs

_BYTES_PER_US = 2.98e6
# Copies of the logits fill twice an H100's second-level cache.
_COPIES_BYTES = 100 << 20
_REPEATS = 7
_SPREADS = {"flat": 1.0, "peaked": 4.0}
_KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


def make_columns(rows: int, vocab_size: int, kind: dict[str, float]) -> SamplingColumns:
    """The same parameters for each row, with seeds of their own."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), kind.get(name, default), dtype=dtype, device="cuda")

    return SamplingColumns(
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        top_k=column("top_k", vocab_size, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        seed=torch.arange(rows, device="cuda") * 0x9E3779B97F4A,
        sequence_index=column("sequence_index", 0, torch.int32),
        position=column("position", 0, torch.int32),
    )


def microseconds(calls: list[Callable[[], object]]) -> float:
    """The median of some replays of a graph of all calls, a call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def make_cases(
    logits: torch.Tensor, config: SamplingConfig
) -> dict[str, list[Callable[[], object]]]:
    """What is timed, by name: a call for each copy of the logits [copies, R, V]."""
    _, rows, vocab_size = logits.shape
    workspace = SamplingWorkspace(rows, vocab_size, "cuda", config)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    out, last = torch.zeros_like(slots), torch.zeros_like(slots)
    epilogue = Epilogue(last, last)

    def draw(copy: torch.Tensor, columns: SamplingColumns) -> None:
        sample(copy, slots, columns, out, workspace, epilogue=epilogue)

    cases: dict[str, list[Callable[[], object]]] = {
        "argmax_of_torch": [partial(torch.argmax, copy, -1) for copy in logits],
        "logprobs_5": [partial(raw_logprobs, copy, slots, 5) for copy in logits],
    }
    for name, kind in _KINDS.items():
        columns = make_columns(rows, vocab_size, kind)
        cases[name] = [partial(draw, copy, columns) for copy in logits]
    return cases


def measure(
    row_counts: list[int], vocab_size: int, config: SamplingConfig
) -> Iterator[dict[str, Any]]:
    """One line for each case."""
    for rows in row_counts:
        size = rows * vocab_size * 2
        shape = (-(-_COPIES_BYTES // size), rows, vocab_size)
        for spread, deviation in _SPREADS.items():
            generator = torch.Generator(device="cuda").manual_seed(rows)
            logits = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            logits.normal_(std=deviation, generator=generator)
            for name, calls in make_cases(logits, config).items():
                taken, floor = microseconds(calls), size / _BYTES_PER_US
                yield {
                    "test": "sampling",
                    "kind": name,
                    "logits": spread,
                    "rows": rows,
                    "vocab_size": vocab_size,
                    "us": round(taken, 1),
                    "floor_us": round(floor, 1),
                    "over_floor": round(taken / floor, 2),
                    "card": torch.cuda.get_device_name(),
                }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--out", type=Path, help="a file to which the lines are added")
    defaults = SamplingConfig()
    for name in vars(defaults):
        flag = f"--{name.replace('_', '-')}"
        default = getattr(defaults, name)
        text = f"SamplingConfig.{name}; default: %(default)s"
        parser.add_argument(flag, type=int, default=default, help=text)
    arguments = parser.parse_args()
    config = SamplingConfig(**{name: getattr(arguments, name) for name in vars(defaults)})
    for line in measure(arguments.rows, arguments.vocab_size, config):
        text = json.dumps(line)
        print(text, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
