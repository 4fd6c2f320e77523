"""Times the triton attention backend on a GPU, inside CUDA graphs.

Usage: python -m tests.bench.gpu_kernels.attention [--out FILE] [--sweep] [--head-dim N ...]

One line of JSON for each shape: microseconds a call (the median of some replays), the floor (keys,
values, queries and results once at 2.98 TB/s, or the products at 747 TFLOP/s, which an H100 was
measured to reach) and the time over it. Calls of one graph read different blocks, more than caches
hold. --sweep times other tiles than the backend's instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagewire_kernels.attention import AttentionMetadata
from pagewire_kernels.gpu import attention
from pagewire_kernels.gpu.attention import Tile, TritonAttention, load_backend

BYTES_PER_US, FLOPS_PER_US = 2.983e6, 747e6
BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS = 32, 8
DTYPE = torch.bfloat16
_CACHED_BYTES = 200 << 20
_MOST_TABLES = 128
_FEWEST_CALLS = 32
_REPLAYS = 15
DECODES = [(1, 256), (8, 256), (64, 256), (256, 256), (8, 2048), (64, 2048), (64, 8192)]
CHUNKS = [(16, 1024, 1024), (4, 512, 4096)]  # sequences, new tokens, context
WRITES = [1, 64, 256, 16384]
CHUNK_TILES = [
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 5),
    Tile(128, 64, 8, 7),
    Tile(128, 128, 8, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 5),
    Tile(64, 128, 4, 3),
    Tile(128, 64, 4, 5),
]
SWEPT_DECODES = [(1, 256), (8, 2048), (64, 256), (64, 2048)]
DECODE_TILES = [
    Tile(16, keys, num_warps, num_stages)
    for keys, num_warps, num_stages in (
        (64, 4, 4),
        (64, 2, 4),
        (64, 4, 5),
        (64, 2, 5),
        (32, 2, 5),
        (128, 4, 4),
        (128, 8, 5),
    )
]
DECODE_PROGRAMS = [128, 256, 512]


def decode_metadata(tables: np.ndarray, context: int) -> AttentionMetadata:
    """One token a sequence."""
    batch = len(tables)
    return AttentionMetadata.from_host(
        np.arange(batch + 1, dtype=np.int32),
        np.full(batch, context, np.int32),
        tables,
        tables[:, (context - 1) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE,
        batch,
        "cuda",
    )


def chunk_metadata(tables: np.ndarray, new: int, context: int) -> AttentionMetadata:
    """The last `new` tokens of each context."""
    batch = len(tables)
    return AttentionMetadata.from_host(
        np.arange(batch + 1, dtype=np.int32) * new,
        np.full(batch, context, np.int32),
        tables,
        np.zeros(batch * new, np.int64),
        0,
        "cuda",
    )


def microseconds(calls: list[Callable[[], object]]) -> float:
    """The median time of a call, when all are replayed one after the other."""
    stream: Any = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


class Pool:
    """Caches of one head size, and block tables into them that share no block."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        most = max(batch * context for batch, context in DECODES)
        self.num_blocks = most // BLOCK_SIZE + 4096
        shape = (self.num_blocks, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
        self.key_cache, self.value_cache = (
            torch.randn(shape, device="cuda", dtype=DTYPE) for _ in range(2)
        )
        self._order = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)

    def tables(self, batch: int, context: int) -> list[np.ndarray]:
        """Tables for the calls of a graph: until they cover more than caches hold."""
        width = -(-context // BLOCK_SIZE)
        table_bytes = batch * width * BLOCK_SIZE * 2 * NUM_KV_HEADS * self.head_dim * 2
        wanted = max(1, min(_MOST_TABLES, _CACHED_BYTES // table_bytes))
        count = min(wanted, self.num_blocks // (batch * width))
        return list(self._order[: count * batch * width].reshape(count, batch, width))

    def packed(self, num_tokens: int) -> torch.Tensor:
        """Heads as a qkv projection leaves them."""
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        return torch.randn((num_tokens, heads, self.head_dim), device="cuda", dtype=DTYPE)


def attention_time(backend: TritonAttention, pool: Pool, steps: list[AttentionMetadata]) -> float:
    """Microseconds of a call; each reads another step's blocks."""
    query = pool.packed(len(steps[0].slot_mapping))[:, :NUM_HEADS]
    scale = pool.head_dim**-0.5
    return microseconds(
        [
            lambda step=step: backend.paged_attention(
                query, pool.key_cache, pool.value_cache, step, scale
            )
            for step in steps
        ]
        * max(1, _FEWEST_CALLS // len(steps))
    )


def decode_line(
    backend: TritonAttention, pool: Pool, batch: int, context: int, **more: Any
) -> dict[str, Any]:
    steps = [decode_metadata(tables, context) for tables in pool.tables(batch, context)]
    time = attention_time(backend, pool, steps)
    moved = batch * pool.head_dim * 2 * (2 * context * NUM_KV_HEADS + 2 * NUM_HEADS)
    line = {"test": "decode", "batch": batch, "context": context, "head_dim": pool.head_dim, **more}
    return line | _over(time, moved / BYTES_PER_US) | {"tb_s": round(moved / time / 1e6, 3)}


def chunk_line(
    backend: TritonAttention, pool: Pool, batch: int, new: int, context: int, **more: Any
) -> dict[str, Any]:
    tables = pool.tables(batch, context)[:4]
    time = attention_time(backend, pool, [chunk_metadata(t, new, context) for t in tables])
    seen = batch * sum(range(context - new + 1, context + 1))
    flops = 4 * NUM_HEADS * pool.head_dim * seen
    shape = {"test": "chunk", "batch": batch, "tokens": new, "context": context}
    rate = {"tflop_s": round(flops / time / 1e6, 1)}
    line = shape | {"head_dim": pool.head_dim} | more
    return line | _over(time, flops / FLOPS_PER_US) | rate


def write_line(backend: TritonAttention, pool: Pool, num_tokens: int) -> dict[str, Any]:
    slots = torch.randperm(pool.num_blocks * BLOCK_SIZE, device="cuda")[:num_tokens]
    positions = torch.arange(num_tokens, device="cuda") % 4096
    cos, sin = torch.randn((2, 4096, pool.head_dim // 2), device="cuda")
    heads = pool.packed(num_tokens)
    query, key, value = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    caches = (pool.key_cache, pool.value_cache)
    time = microseconds(
        [lambda: backend.rotate_and_write(query, key, value, positions, cos, sin, *caches, slots)]
        * _FEWEST_CALLS
    )
    line = {"test": "rotate_and_write", "tokens": num_tokens, "head_dim": pool.head_dim}
    return line | _over(time, 2 * heads.nbytes / BYTES_PER_US)


def _over(time: float, floor: float) -> dict[str, float]:
    return {"us": round(time, 2), "floor_us": round(floor, 2), "over": round(time / floor, 3)}


def swept_lines(backend: TritonAttention, pool: Pool) -> Iterator[dict[str, Any]]:
    """Chunks with each tile, decodes with each tile and number of programs."""
    with pytest.MonkeyPatch.context() as patch:
        for tile in CHUNK_TILES:
            patch.setattr(attention, "chunk_tile", lambda *shape, tile=tile: tile)
            for shape in CHUNKS:
                yield _tried(chunk_line, backend, pool, *shape, tile=str(tile))
        for tile in DECODE_TILES:
            patch.setattr(attention, "decode_tile", lambda *shape, tile=tile: tile)
            for programs in DECODE_PROGRAMS:
                patch.setattr(attention, "_DECODE_PROGRAMS", programs)
                for shape in SWEPT_DECODES:
                    about = {"tile": str(tile), "programs": programs}
                    yield _tried(decode_line, backend, pool, *shape, **about)


def _tried(line: Callable[..., dict[str, Any]], *shape: Any, **about: Any) -> dict[str, Any]:
    try:
        return line(*shape, **about)
    except Exception as error:  # of Triton: too little shared memory
        return {**about, "error": str(error)[:80]}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="file to append the lines to")
    parser.add_argument("--sweep", action="store_true", help="try other tiles than the backend's")
    parser.add_argument("--head-dim", type=int, nargs="*", default=[128, 64], help="sizes of heads")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {"card": torch.cuda.get_device_name(), "commit": commit}
    backend = load_backend(torch.device("cuda"))
    undependent = TritonAttention(dependent_launch=False)
    lines: list[dict[str, Any]] = []

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line | about), flush=True)
        lines.append(line | about)

    for head_dim in arguments.head_dim:
        pool = Pool(head_dim)
        if arguments.sweep:
            for line in swept_lines(backend, pool):
                tell(line)
            continue
        for batch, context in DECODES:
            tell(decode_line(backend, pool, batch, context))
        tell(decode_line(undependent, pool, 1, 256, dependent_launch=False))
        for shape in CHUNKS:
            tell(chunk_line(backend, pool, *shape))
        for num_tokens in WRITES:
            tell(write_line(backend, pool, num_tokens))
    if arguments.out:
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
