"""Penalties, logit bias and suspended stop tokens, from counts that live on the device.

Sampling adjusts logits where it reads them, so that adjusted ones are never stored, and counts the
token it chose. A step needs nothing of it from the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# A word of a history: how often the token is in the output, and two marks.
IN_PROMPT = 1 << 30
SUSPENDED = 1 << 29
_COUNT_MASK = tl.constexpr(SUSPENDED - 1)
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_SUSPENDED = tl.constexpr(SUSPENDED)
_NONE = -1


@dataclass(frozen=True)
class Adjustments:
    """What sampling reads besides the logits.

    Attributes:
        histories: int32 [H, V], words of what a sequence's prompt and output hold.
        biases: float32 [B, V], added to logits.
        history, bias: int32 [S] by slot: a row of `histories` and of `biases`; -1: none.
        repetition, frequency, presence: float32 [S], as SamplingParams has them.
        min_tokens: int32 [S]; suspended tokens are removed before that many were produced.
    """

    histories: Tensor
    biases: Tensor
    history: Tensor
    bias: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    min_tokens: Tensor

    def pointers(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        return (
            self.histories,
            self.biases,
            self.history,
            self.bias,
            self.repetition,
            self.frequency,
            self.presence,
            self.min_tokens,
        )


@dataclass(frozen=True)
class Penalties:
    """What changes the logits of one sequence; token ids outside the vocabulary are refused.

    Attributes:
        prompt_token_ids: for the repetition penalty.
        output_token_ids: what the sequence has produced so far.
        repetition, frequency, presence: 1, 0 and 0 change nothing.
        min_tokens: `suspended_token_ids` can't be chosen before so many tokens.
        suspended_token_ids: stop tokens and, unless ignored, the end-of-sequence ids.
        bias: added to the logits of some tokens.
    """

    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_tokens: int = 0
    suspended_token_ids: Collection[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def suspends(self) -> bool:
        """Whether some tokens are suspended now."""
        return len(self.output_token_ids) < self.min_tokens and bool(self.suspended_token_ids)

    @property
    def needs_history(self) -> bool:
        """Whether logits depend on what was produced."""
        penalised = (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)
        return penalised or self.suspends

    def words(self) -> dict[int, int]:
        """The words of its history that are not 0, by token id."""
        words = Counter(self.output_token_ids)
        if self.repetition != 1.0:
            for token_id in set(self.prompt_token_ids):
                words[token_id] += IN_PROMPT
        if self.suspends:
            for token_id in set(self.suspended_token_ids):
                words[token_id] += SUSPENDED
        return words


class PenaltyState:
    """Histories and biases on the device, and which slot of the batch has which.

    All writes are queued on the current stream, behind the steps launched before; nothing waits.
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: torch.device | str,
        *,
        num_histories: int,
        num_biases: int,
    ) -> None:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        self.adjustments = Adjustments(
            histories=torch.zeros((num_histories, vocab_size), dtype=torch.int32, device=device),
            biases=torch.zeros((num_biases, vocab_size), dtype=torch.float32, device=device),
            history=column(_NONE, torch.int32),
            bias=column(_NONE, torch.int32),
            repetition=column(1.0, torch.float32),
            frequency=column(0.0, torch.float32),
            presence=column(0.0, torch.float32),
            min_tokens=column(0, torch.int32),
        )
        self._vocab_size = vocab_size
        self._free_histories = list(reversed(range(num_histories)))
        self._free_biases = list(reversed(range(num_biases)))
        self._history_of: dict[int, int] = {}
        self._bias_of: dict[int, int] = {}

    def acquire(self, slot: int, penalties: Penalties) -> bool:
        """Gives a slot what its sequence needs, and loads it.

        A sequence that comes back (preempted, resubmitted) is loaded again with its output so far.

        Args:
            slot: of the batch; one that has something already is released first.
            penalties: of the sequence.

        Returns:
            False, with the slot left without any, if no history or bias is free.

        Raises:
            ValueError: a token id outside the vocabulary.
        """
        self.release(slot)
        words = penalties.words() if penalties.needs_history else {}
        self._check("token ids", words)
        self._check("logit_bias", penalties.bias)
        if penalties.needs_history and not self._free_histories:
            return False
        if penalties.bias and not self._free_biases:
            return False
        adjustments = self.adjustments
        if penalties.needs_history:
            row = self._history_of[slot] = self._free_histories.pop()
            self._fill(adjustments.histories[row], words)
            _set(adjustments.history, slot, row)
            _set(adjustments.repetition, slot, penalties.repetition)
            _set(adjustments.frequency, slot, penalties.frequency)
            _set(adjustments.presence, slot, penalties.presence)
            _set(adjustments.min_tokens, slot, penalties.min_tokens)
        if penalties.bias:
            row = self._bias_of[slot] = self._free_biases.pop()
            self._fill(adjustments.biases[row], penalties.bias)
            _set(adjustments.bias, slot, row)
        return True

    def release(self, slot: int) -> None:
        """Takes back what a slot has, if anything."""
        if slot in self._history_of:
            self._free_histories.append(self._history_of.pop(slot))
            _set(self.adjustments.history, slot, _NONE)
        if slot in self._bias_of:
            self._free_biases.append(self._bias_of.pop(slot))
            _set(self.adjustments.bias, slot, _NONE)

    def _check(self, name: str, token_ids: Collection[int]) -> None:
        # On the device an index out of range would end the process.
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise ValueError(f"{name} must lie between 0 and {self._vocab_size - 1}")

    def _fill(self, row: Tensor, values: Mapping[int, int] | Mapping[int, float]) -> None:
        row.zero_()
        if values:
            token_ids = _to_device(torch.tensor(list(values), dtype=torch.int64), row.device)
            entries = _to_device(torch.tensor(list(values.values()), dtype=row.dtype), row.device)
            row.index_copy_(0, token_ids, entries)


def _set(column: Tensor, slot: int, value: float) -> None:
    """column[slot] = value, which on CUDA would be a copy from the host that waits: so the value is
    an argument of a kernel."""
    column.select(0, slot).fill_(value)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copied without waiting."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@triton.jit
def open_adjustment(
    adjustments: tl.tuple, slot: tl.tensor, position: tl.tensor, vocab_size: tl.tensor
) -> Any:
    """A row's part of `Adjustments.pointers()`, for `load_logits` and `count_token`."""
    histories, biases, history, bias, repetition, frequency, presence, min_tokens = adjustments
    history_row = tl.load(history + slot)
    bias_row = tl.load(bias + slot)
    return (
        history_row,
        histories + history_row.to(tl.int64) * vocab_size,
        bias_row,
        biases + bias_row.to(tl.int64) * vocab_size,
        tl.load(repetition + slot),
        tl.load(frequency + slot),
        tl.load(presence + slot),
        position < tl.load(min_tokens + slot),
    )


@triton.jit
def load_logits(
    row: tl.tensor, token_ids: tl.tensor, inside: tl.tensor, adjustment: tl.tuple
) -> Any:
    """Logits as sampling sees them.

    Args:
        row: pointer to the row's first logit.
        token_ids: int32, any shape.
        inside: bool, the same shape; -inf elsewhere.
        adjustment: from `open_adjustment`; None: logits as they are.

    Returns:
        float32. NaN and +inf stay what they are, so that they can be found.
    """
    logits = tl.load(row + token_ids, mask=inside, other=float("-inf")).to(tl.float32)
    if adjustment is not None:
        history, words, bias, biases, repetition, frequency, presence, suspends = adjustment
        suspended = token_ids * 0
        if history >= 0:
            word = tl.load(words + token_ids, mask=inside, other=0)
            count = word & _COUNT_MASK
            repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
            seen = (count > 0) | ((word & _IN_PROMPT) != 0)
            taken = frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
            logits = tl.where(seen, repeated, logits) - taken
            suspended = word & _SUSPENDED
        if bias >= 0:
            logits += tl.load(biases + token_ids, mask=inside, other=0.0)
        removed = (suspended != 0) & suspends & (logits < float("inf"))
        logits = tl.where(removed, float("-inf"), logits)
    return logits


@triton.jit
def count_token(adjustment: tl.tuple, token: tl.tensor) -> None:
    """Adds a chosen token to the row's history, if it has one."""
    history, words, _, _, _, _, _, _ = adjustment
    if (history >= 0) & (token >= 0):
        tl.store(words + token, tl.load(words + token) + 1)
