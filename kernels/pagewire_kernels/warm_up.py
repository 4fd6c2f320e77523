"""Compiling, before the first step, the kernels that a model will need: side by side.

A backend takes part by a method `warm_up(shapes) -> list of callables without arguments`, each of
which asks Triton for one kernel (`kernel.warmup(...)`, with the types, constants and options of a
launch). They run in Triton's AsyncCompileMode: the asking takes no time, and a pool of threads
compiles. What was compiled once is found in Triton's cache on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

logger = logging.getLogger(__name__)

_MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class WarmUpShapes:
    """What a model and its engine's settings will ask of kernels.

    Attributes:
        device: a CUDA device.
        dtype: of weights and activations.
        cache_dtype: of keys and values in the cache.
        hidden_size, intermediate_size, vocab_size: of the model; intermediate_size is 0 where the
            model has none of that name.
        num_heads, num_kv_heads, head_dim: of attention.
        sliding_windows: those that layers have, None for those without.
        block_size: tokens in a KV block.
        max_num_seqs, max_num_batched_tokens, max_model_len: the engine's limits.
    """

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@runtime_checkable
class WarmsUp(Protocol):
    """A backend whose kernels can be compiled ahead."""

    def warm_up(self, shapes: WarmUpShapes) -> list[Callable[[], object]]:
        """One callable for each kernel that such a model will launch."""
        ...


def compile_ahead(backends: Iterable[object], shapes: WarmUpShapes) -> int:
    """Compiles the kernels of those backends that take part; the number of kernels.

    One that can't be compiled is compiled again by its first launch, which then tells why.
    """
    asked = [
        task
        for backend in backends
        if isinstance(backend, WarmsUp)
        for task in backend.warm_up(shapes)
    ]
    if not asked:
        return 0
    import triton

    started = time.monotonic()
    threads = min(os.cpu_count() or 1, len(asked), _MOST_THREADS)
    with (
        torch.cuda.device(shapes.device) if shapes.device.type == "cuda" else nullcontext(),
        ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for task in asked:
            _ask(task)
    logger.info("%d kernels compiled or found in %.1f s", len(asked), time.monotonic() - started)
    return len(asked)


def _ask(task: Callable[[], object]) -> None:
    try:
        task()
    except Exception as error:  # of any kind: Triton's compiler is asked, not run
        logger.warning("a kernel can't be compiled ahead: %s", error)
