"""Which tokens the constraints of sequences allow next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.errors import PagewireError
from pagewire.sampling_params import SamplingParams
from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.step import StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.wind_down import WATCHED
from pagewire_engine.worker.staging import sent

Bits = npt.NDArray[np.uint32]
_WORD_BITS = 32


class ConstrainedRow(Protocol):
    """What is read of a sequence that takes a token."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def output_token_ids(self) -> list[int]: ...


RowT = TypeVar("RowT", bound=ConstrainedRow)


class Masks(NamedTuple):
    """The masks of a step.

    Attributes:
        rows: sequence id to its row of `bits`.
        bits: uint32 [len(rows), ceil(vocab_size / 32)]; bit t % 32 of word t // 32 is set where
            token t is allowed. No row is empty.
        refused: (sequence id, why) where a constraint can't be kept.
    """

    rows: dict[int, int]
    bits: Bits
    refused: list[tuple[int, str]]

    def less_refused(self, rows: list[RowT]) -> list[RowT]:
        """Those of the rows that are not refused."""
        if not self.refused:
            return rows
        refused = dict(self.refused)
        return [row for row in rows if row.sequence_id not in refused]


class _Progress:
    """A sequence's matcher, and how many tokens of the output it has seen."""

    __slots__ = ("matcher", "num_tokens")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.num_tokens = 0


class GrammarMasks:
    """Keeps a matcher for each constrained sequence. A matcher is derived from the constraint and
    the sequence's output: it is brought up to that output whenever a mask is asked for, and made
    anew for a sequence that was forgotten meanwhile.

    Args:
        compiler: compiles constraints, and knows those compiled at admission.
        vocab_size: rows of the output embedding.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._eos_token_ids = tuple(eos_token_ids)
        self._progress: dict[int, _Progress] = {}
        self._no_bits: Bits = np.empty((0, self._num_words), np.uint32)

    def __len__(self) -> int:
        """Sequences that have a matcher."""
        return len(self._progress)

    def apply(self, plan: StepPlan) -> None:
        """Drops what is kept for sequences that the plan takes away, or introduces anew."""
        for sequence_id in plan.forgotten:
            self._progress.pop(sequence_id, None)
        for new in plan.new_sequences:
            self._progress.pop(new.sequence_id, None)

    def masks(self, rows: Sequence[ConstrainedRow]) -> Masks:
        """The masks for those of `rows` that are constrained."""
        constrained = [row for row in rows if row.params.structured_output is not None]
        if not constrained:
            return Masks({}, self._no_bits, [])
        matchers: list[Matcher] = []
        ready: list[ConstrainedRow] = []
        refused: list[tuple[int, str]] = []
        for row in constrained:
            try:
                matchers.append(self._matcher(row))
            except PagewireError as error:
                refused.append((row.sequence_id, error.message))
            else:
                ready.append(row)
        bits: Bits = np.zeros((len(ready), self._num_words), np.uint32)
        self._compiler.fill(matchers, bits)
        rows_of_bits: dict[int, int] = {}
        for index, (row, matcher) in enumerate(zip(ready, matchers, strict=True)):
            if (fault := matcher.fault()) is not None:
                refused.append((row.sequence_id, fault))
                continue
            self._suspend_stops(bits[index], row)
            rows_of_bits[row.sequence_id] = index
        return Masks(rows_of_bits, bits, refused)

    def _matcher(self, row: ConstrainedRow) -> Matcher:
        progress = self._progress.get(row.sequence_id)
        if progress is None:
            constraint = row.params.structured_output
            assert constraint is not None
            progress = _Progress(self._compiler.matcher(constraint, _room(row.params)))
            self._progress[row.sequence_id] = progress
        new = row.output_token_ids[progress.num_tokens :]
        if new:
            progress.num_tokens += len(new)
            progress.matcher.advance(new)
        return progress.matcher

    def _suspend_stops(self, bits: Bits, row: ConstrainedRow) -> None:
        """Takes away what would end a sequence before its time, but where nothing else is left: a
        text that is complete can't go on."""
        params, too_early = row.params, len(row.output_token_ids) < row.params.min_tokens
        if not (too_early or params.ignore_eos):
            return
        stops = (*self._eos_token_ids, *(params.stop_token_ids if too_early else ()))
        others = bits.copy()
        for token_id in stops:
            others[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
        if others.any():
            bits[:] = others


def _room(params: SamplingParams) -> int | None:
    """The tokens within which an output has to come to its end; None where it is not to, or might
    have to come to it before `min_tokens`."""
    if params.ignore_eos or params.max_tokens is None:
        return None
    if params.min_tokens and params.max_tokens - params.min_tokens < WATCHED:
        return None
    return params.max_tokens


def forbidden_tokens(bits: Bits, vocab_size: int, device: torch.device) -> Tensor:
    """Bits as bool [rows, vocab_size]: True where the token is not allowed. On a GPU they are
    unpacked there, since packed there is an eighth of that to copy."""
    if device.type == "cpu":
        octets = (~bits).view(np.uint8)
        unpacked = np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(unpacked.view(np.bool_))
    words = sent(torch.from_numpy(bits.view(np.int32)), device)
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    return ((words.unsqueeze(-1) >> shifts) & 1).view(len(bits), -1)[:, :vocab_size] == 0
