"""Which tokens constraints allow rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD_BITS = 32


class TokenMasks(NamedTuple):
    """What each of R rows may take.

    Attributes:
        rows: R of them: each one's row of `bits`; -1 where all is allowed.
        bits: int32 [M, ceil(V / 32)] on the CPU, contiguous; bit t % 32 of word t // 32 is set
            where token t is allowed.
    """

    rows: Sequence[int]
    bits: Tensor


def masked_logits(logits: Tensor, masks: TokenMasks | None) -> Tensor:
    """Logits, -inf where a token is forbidden: the reference, on any device.

    Args:
        logits: [R, V] float32, left as they are.
        masks: of the R rows.

    Returns:
        [R, V] float32; `logits` themselves where nothing is masked.
    """
    masked = [] if masks is None else [row for row, mask in enumerate(masks.rows) if mask >= 0]
    if masks is None or not masked:
        return logits
    where = torch.tensor(masked, device=logits.device)
    bits = masks.bits[[masks.rows[row] for row in masked]].to(logits.device)
    taken = logits.clone()
    taken[where] = taken[where].masked_fill_(forbidden(bits, logits.shape[1]), -math.inf)
    return taken


def forbidden(bits: Tensor, vocab_size: int) -> Tensor:
    """Masks as bool [M, vocab_size]: True where a token is not allowed.

    Args:
        bits: int32 [M, ceil(vocab_size / 32)], see `TokenMasks`.
        vocab_size: tokens.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).view(len(bits), -1)[:, :vocab_size] == 0
