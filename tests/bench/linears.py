"""Times the C++ linears of each kind of weights beside torch's, and the attention of prompts.

Usage: python -m tests.bench.linears [--threads N] [--tokens N ...] [--level NAME]

One line of JSON for each kind and number of tokens: the sum of the best times of a layer's shapes,
microseconds. Weights go through more copies than caches hold, as those of a model's layers do. The
last line is of attention, of one layer and prompts that have 512 tokens together.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pagewire_kernels import build, cpu
from pagewire_kernels.cpu import CpuAttention
from pagewire_kernels.cpu_dense import CpuDense
from pagewire_kernels.quantization import quantize_int8
from tests.fakes.attention_batch import make_batch

# (outputs, depth) of SmolLM2-135M: qkv, gate and up, down.
_SHAPES = ((960, 576), (3072, 576), (576, 1536))
_REPEATS = 9
_COPIES = 30


def best_microseconds(call: Callable[[Any], object], weights: list[Any]) -> float:
    """The best of some rounds through the weights, a weight."""
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for weight in weights:
            call(weight)
        best = min(best, time.perf_counter() - began)
    return best / len(weights) * 1e6


def measure(dense: CpuDense, tokens: int) -> dict[str, float]:
    """Microseconds of the shapes together, by kind of weights."""
    total = dict.fromkeys(("float32", "bfloat16", "int8", "torch"), 0.0)
    for outputs, depth in _SHAPES:
        hidden = torch.randn(tokens, depth)
        plain = [torch.randn(outputs, depth) * 0.02 for _ in range(_COPIES)]
        total["torch"] += best_microseconds(lambda w, x=hidden: F.linear(x, w), plain)
        kinds: dict[str, list[Any]] = {
            "float32": plain,
            "bfloat16": [weight.bfloat16() for weight in plain],
            "int8": [quantize_int8(weight) for weight in plain],
        }
        for kind, weights in kinds.items():
            packed = [dense.pack(weight) for weight in weights]
            total[kind] += best_microseconds(lambda w, x=hidden: dense.linear(x, w), packed)
    return total


def attention_microseconds(attention: CpuAttention) -> float:
    """Three prompts that have 512 tokens together, keys and values in bfloat16."""
    prompts = [(length, length) for length in (171, 171, 170)]
    batch = make_batch([], prompts, cache_dtype=torch.bfloat16)
    scale = batch.query.shape[-1] ** -0.5

    def attend(_: object) -> None:
        attention.paged_attention(
            batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale
        )

    return best_microseconds(attend, [None] * _COPIES)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 32, 192])
    parser.add_argument(
        "--level",
        default=build.own_level().name,
        choices=[level.name for level in (*build.X86_LEVELS, build.own_level())],
        help="instructions; default: the best there are",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    levels = {level.name: level for level in (*build.X86_LEVELS, build.own_level())}
    library = build.build(levels[arguments.level])
    loaded = cpu.load_library(library)
    dense = CpuDense(loaded)
    for tokens in arguments.tokens:
        for kind, microseconds in measure(dense, tokens).items():
            line = {"level": arguments.level, "threads": arguments.threads, "tokens": tokens}
            print(json.dumps({**line, "weights": kind, "us": round(microseconds)}), flush=True)
    microseconds = attention_microseconds(CpuAttention(loaded))
    line = {"level": arguments.level, "threads": arguments.threads, "tokens": 512}
    print(json.dumps({**line, "what": "attention", "us": round(microseconds)}), flush=True)


if __name__ == "__main__":
    main()
