"""Compiles the Triton kernels that a model's steps launch, side by side, before the first step.

A kernel is compiled for the types, constants and alignments of a launch. Rather than to list those,
the model itself is run, on steps of every kind, in a mode in which its launches only compile.
"""

from __future__ import annotations

import logging
import time

import torch

from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import ForwardContext
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_kernels.attention import AttentionBackend, AttentionMetadata
from pagewire_kernels.gpu.launch import compiled_only

logger = logging.getLogger(__name__)

# Decodes in a step: one row, few rows, and more go different ways, and numbers that are multiples
# of 16 are compiled for by themselves.
_DECODES = (1, 2, 8, 16, 24, 64)
# Tokens of a prompt, alone and beside a decode.
_CHUNK = 40


@torch.inference_mode()
def compile_ahead(
    model: CausalLM,
    attention: AttentionBackend,
    cache: CacheEngine,
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> None:
    """Compiles what the model and its head launch.

    Args:
        model: with its weights.
        attention: the backend it shall compute with.
        cache: of one block or more; nothing is written to it.
        max_num_seqs: most decodes in a step.
        max_model_len: longest context: it decides how decodes are split.
    """
    started = time.monotonic()
    table_width = -(-max_model_len // cache.block_size)
    steps = [(decodes, 0) for decodes in _DECODES if decodes <= max_num_seqs]
    steps += [(decodes, _CHUNK) for decodes in (0, 1)]
    with compiled_only():
        for num_decodes, chunk in steps:
            metadata = _metadata(num_decodes, chunk, table_width, cache.key_caches[0].device)
            zeros = torch.zeros_like(metadata.slot_mapping)
            context = ForwardContext(attention, metadata, cache.key_caches, cache.value_caches)
            hidden = model(zeros, zeros, context)
            model.compute_logits(hidden)
    logger.info(
        "kernels compiled, or found as compiled before, in %.1f s", time.monotonic() - started
    )


def _metadata(
    num_decodes: int, chunk: int, table_width: int, device: torch.device
) -> AttentionMetadata:
    """A step of so many decodes and a prompt's chunk, whose tokens are written nowhere."""
    lengths = [1] * num_decodes + ([chunk] if chunk else [])
    starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    return AttentionMetadata(
        query_start_locations=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.zeros((len(lengths), table_width), dtype=torch.int32, device=device),
        slot_mapping=torch.full((starts[-1],), -1, device=device),
        num_decodes=num_decodes,
        host_query_start_locations=starts,
        host_context_lengths=lengths,
    )
