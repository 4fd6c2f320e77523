"""Log probabilities of tokens by rows of logits: plain torch, any device.

Every row is treated by itself, and gives the same bits whatever is beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire_kernels.token_order import NEGATIVE_INFINITY, largest

# Logits that are looked at in one go: bounds the temporaries.
_CHUNK_ELEMENTS = 1 << 20


def raw_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities by the logits as they are: before temperature, penalties and filters.

    Args:
        logits: [N, V] float32.
        token_ids: int64 [N], the token at each position.
        num_top: likeliest tokens to name as well.

    Returns:
        logprobs [N] and ranks int64 [N] (1 = likeliest) of `token_ids`, logprobs [N, num_top] and
        ids int64 [N, num_top] of the likeliest in falling order.
    """
    rows_at_once = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    parts = [
        _raw_logprobs(
            logits[start : start + rows_at_once], token_ids[start : start + rows_at_once], num_top
        )
        for start in range(0, logits.shape[0], rows_at_once)
    ]
    logprobs, ranks, top_logprobs, top_ids = (
        torch.cat(column) for column in zip(*parts, strict=True)
    )
    return logprobs, ranks, top_logprobs, top_ids


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, the lower id first among equals.

    Args:
        logits: [N, V] float32, no NaN.
        count: at least 1; cut to V.

    Returns:
        Log probabilities float32 [N, count] in falling order, and int64 ids [N, count].
    """
    logprobs = torch.log_softmax(_aligned(logits), dim=-1)
    _, ids = largest(logits, count)
    ids = ids[:, :count]
    return logprobs.gather(-1, ids), ids


def _raw_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = token_ids[:, None]
    logprobs = torch.log_softmax(_aligned(logits), dim=-1)
    own = logits.gather(-1, index)
    earlier = torch.arange(logits.shape[-1], device=logits.device) < index
    better = (logits > own) | ((logits == own) & earlier)
    _, top_ids = largest(logits, num_top) if num_top else (None, index[:, :0])
    return (
        logprobs.gather(-1, index)[:, 0],
        better.sum(dim=-1) + 1,
        logprobs.gather(-1, top_ids),
        top_ids,
    )


def _aligned(logits: Tensor) -> Tensor:
    """The rows, each beginning at 16 bytes: on CUDA torch adds up others in another order, so that
    a row's last bits would depend on where in the batch it lies."""
    odd = logits.shape[-1] % 4
    if not odd or logits.device.type == "cpu":
        return logits
    return torch.nn.functional.pad(logits, (0, 4 - odd), value=NEGATIVE_INFINITY)
