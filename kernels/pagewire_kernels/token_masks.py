"""Logits less the tokens that constraints forbid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels.attention import BackendUnavailableError

_WORD_BITS = 32


class MaskedRows(Protocol):
    """Takes rows of logits, and of each what its mask allows; backends take the same."""

    def take(
        self,
        logits: Tensor,
        rows: Sequence[int],
        masks: Sequence[int],
        bits: Tensor,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, list[bool]]:
        """Some rows, -inf where a token is forbidden.

        Args:
            logits: [R, V] float32; left as they are, unless `in_place`.
            rows: N rows of them.
            masks: each one's row of `bits`; -1 where all is allowed.
            bits: int32 [M, ceil(V / 32)] on the CPU; bit t % 32 of word t // 32 is set where token
                t is allowed.
            in_place: write to `logits` themselves. `rows` are then all of them in their order.

        Returns:
            [N, V] float32, which may be written to and is good until the next call; and for each
            masked row whether a number is left, else True.
        """
        ...


def load_masked_rows(device: torch.device | str) -> MaskedRows:
    """The fastest there is for a device."""
    if torch.device(device).type == "cpu":
        from pagewire_kernels import cpu  # it builds on this module

        try:
            return cpu.load_masked_rows()
        except BackendUnavailableError:
            pass  # load_token_chooser tells
    return TorchMaskedRows()


class TorchMaskedRows:
    """The reference: any device."""

    def take(
        self,
        logits: Tensor,
        rows: Sequence[int],
        masks: Sequence[int],
        bits: Tensor,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, list[bool]]:
        device = logits.device
        taken = logits
        if not in_place:
            taken = logits[torch.tensor(rows, dtype=torch.int64, device=device)]
        masked = [index for index, mask in enumerate(masks) if mask >= 0]
        if not masked:
            return taken, [True] * len(rows)
        where = torch.tensor(masked, device=device)
        chosen = bits[[masks[index] for index in masked]].to(device)
        taken[where] = taken[where].masked_fill_(forbidden(chosen, logits.shape[1]), -math.inf)
        left = [True] * len(rows)
        for index, is_left in zip(
            masked, (taken[where].amax(-1) > -math.inf).tolist(), strict=True
        ):
            left[index] = is_left
        return taken, left


def forbidden(bits: Tensor, vocab_size: int) -> Tensor:
    """Masks as bool [M, vocab_size]: True where a token is not allowed.

    Args:
        bits: int32 [M, ceil(vocab_size / 32)], see `MaskedRows.take`.
        vocab_size: tokens.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).view(len(bits), -1)[:, :vocab_size] == 0
