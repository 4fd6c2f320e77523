"""Compiles the Triton kernels that a model's steps launch, side by side, before the first step.

A kernel is compiled for the types, constants and alignments of a launch. Rather than to list those,
steps of every kind are run in a mode in which launches only compile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pagewire_engine.step import StepPlan
from pagewire_engine.worker.cuda_graphs import GraphSet, GraphSizes, StepGraph
from pagewire_engine.worker.largest_step import largest_step
from pagewire_kernels.gpu.launch import compiled_only

if TYPE_CHECKING:
    from pagewire_engine.worker.device_runner import DeviceRunner

logger = logging.getLogger(__name__)

# Decodes in a step: one row, few rows, and more go different ways, and numbers that are multiples
# of 16 are compiled for by themselves.
_DECODES = (1, 2, 8, 16, 24, 64)
# Tokens of a prompt, alone and beside a decode.
_CHUNK = 40


class _Once:
    """Implements Recorder: runs what it is to record."""

    def record(self, num_rows: int, run: Callable[[], torch.Tensor]) -> StepGraph:
        return StepGraph(num_rows, run, run())


def compile_ahead(
    runner: DeviceRunner,
    sizes: GraphSizes,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_model_len: int,
    block_size: int,
) -> None:
    """Compiles all that a runner launches.

    Args:
        runner: of its own for this: it is left with sequences that never were computed.
        sizes: of the graphs that are to be captured.
        max_num_seqs: most decodes in a step.
        max_num_tokens: most tokens of a step.
        max_model_len: longest context.
        block_size: tokens of a block of the runner's cache, of which one is enough; nothing is
            written to it.
    """
    started = time.monotonic()
    with compiled_only():
        runner.capture(_compiled_for(sizes, max_num_seqs, max_model_len).graphs(_Once()))
        runner.capture(GraphSet())
        for decodes in (0, 1):
            # No more tokens than there is room for: what is no Triton kernel does run.
            num_tokens = min(decodes + _CHUNK, max_num_tokens)
            num_sequences = min(decodes + 1, max_num_seqs)
            plan = largest_step(num_tokens, num_sequences, max_model_len, block_size)
            runner.execute(plan)
            runner.execute(StepPlan(0, forgotten=[new.sequence_id for new in plan.new_sequences]))
    logger.info(
        "kernels compiled, or found as compiled before, in %.1f s", time.monotonic() - started
    )


def _compiled_for(sizes: GraphSizes, max_num_seqs: int, max_model_len: int) -> GraphSizes:
    """Those sizes of which each takes other kernels than the ones before."""
    return GraphSizes(
        [decodes for decodes in _DECODES if decodes <= max_num_seqs],
        [tokens for tokens in sizes.layers if tokens <= _DECODES[-1]] + list(sizes.layers[-1:]),
        sizes.max_contexts or [max_model_len],
    )
