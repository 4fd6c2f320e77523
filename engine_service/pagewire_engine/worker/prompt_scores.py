"""Log probabilities of prompt tokens, from the hidden states of the chunk that computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire_engine.models.base import CausalLM
from pagewire_engine.step import NewSequence, PromptLogprobsChunk, ScheduledSequence
from pagewire_engine.worker.sampler import prompt_logprobs
from pagewire_kernels.lora import LoraRows

# They need the logits of every row: so many at a time bound their memory.
_LOGITS_ROWS = 64


def score_prompts(
    model: CausalLM,
    parts: Sequence[ScheduledSequence],
    sequences: Sequence[NewSequence],
    starts: Sequence[int],
    hidden: torch.Tensor,
    adapter_rows: LoraRows | None = None,
) -> list[PromptLogprobsChunk]:
    """What a step tells of the prompts of the requests that asked.

    Args:
        model: whose head gives the logits.
        parts: of the step.
        sequences: the sequence of each.
        starts: the first row of each, and the end of the last.
        hidden: [T, hidden].
        adapter_rows: the adapters of these T rows; None: no row has one.
    """
    told: list[PromptLogprobsChunk] = []
    for part, new, row in zip(parts, sequences, starts, strict=False):
        num_top = new.sampling_params.prompt_logprobs
        if num_top is None:
            continue
        first = part.start + 1
        next_ids = new.prompt_token_ids[first : part.start + part.num_tokens + 1]
        positions = []
        for offset in range(0, len(next_ids), _LOGITS_ROWS):
            ids = next_ids[offset : offset + _LOGITS_ROWS]
            rows = slice(row + offset, row + offset + len(ids))
            adapters = None if adapter_rows is None else adapter_rows.take(rows)
            logits = model.compute_logits(hidden[rows], adapters)
            positions += prompt_logprobs(logits, ids, num_top)
        if positions:
            told.append(PromptLogprobsChunk(part.sequence_id, first, positions))
    return told
