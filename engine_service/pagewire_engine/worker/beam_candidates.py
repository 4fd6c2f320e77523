"""What a beam may go on with: the likeliest tokens of a row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire_engine.step import Candidates
from pagewire_engine.worker.sampler import SamplingRow, split_by_health
from pagewire_engine.worker.staging import to_device
from pagewire_kernels.logprobs import likeliest


def beam_candidates(
    logits: Tensor, rows: Sequence[SamplingRow], num_eos_token_ids: int
) -> tuple[list[Candidates], list[tuple[int, str]]]:
    """Candidates for each entry of `rows`.

    Args:
        logits: [R, vocab_size] of any float dtype; left as they are.
        rows: beams, and which row each reads.
        num_eos_token_ids: end-of-sequence ids of the model, for each of which a beam needs one
            candidate more.

    Returns:
        The candidates in the order of `rows`, less those that failed; and (sequence id, why) of the
        failed: rows that hold NaN or +inf.
    """
    healthy, failed = split_by_health(logits, rows)
    if not healthy:
        return [], failed
    counts = [_num_candidates(row, num_eos_token_ids) for row in healthy]
    temperatures = [row.params.temperature or 1.0 for row in healthy]
    index = to_device([row.row for row in healthy], logits.device)
    divisors = to_device(temperatures, logits.device, torch.float32)
    scaled = logits.index_select(0, index).float() / divisors[:, None]
    logprobs, token_ids = (column.tolist() for column in likeliest(scaled, max(counts)))
    return [
        Candidates(row.sequence_id, ids[:count], values[:count])
        for row, count, ids, values in zip(healthy, counts, token_ids, logprobs, strict=True)
    ], failed


def _num_candidates(row: SamplingRow, num_eos_token_ids: int) -> int:
    params = row.params
    assert params.beam_search is not None
    needed = params.beam_search.num_candidates(0 if params.ignore_eos else num_eos_token_ids)
    return max(needed, params.logprobs or 0)
