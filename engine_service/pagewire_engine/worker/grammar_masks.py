"""Which tokens the constraints of sequences allow next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from pagewire.errors import PagewireError
from pagewire.sampling_params import SamplingParams
from pagewire_engine.cpus import available_cpus
from pagewire_engine.end_watch import WATCHED
from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.mask_filling import fill_masks
from pagewire_engine.step import StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.token_bytes import Bits

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
        bits: uint32 [M, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 is set where token t is
            allowed. No row that `rows` names is empty. Until the masks of the next step are made.
        refused: (sequence id, why) where a constraint can't be kept.
    """

    rows: dict[int, int]
    bits: Bits
    refused: list[tuple[int, str]]

    @property
    def words(self) -> torch.Tensor:
        """`bits` as kernels read them: int32."""
        return torch.from_numpy(self.bits.view(np.int32))

    def less_refused(self, rows: list[RowT]) -> list[RowT]:
        """Those of the rows that are not refused."""
        if not self.refused:
            return rows
        refused = dict(self.refused)
        return [row for row in rows if row.sequence_id not in refused]


class MasksToCome:
    """The masks of a step that is being computed.

    Args:
        make: makes them.
    """

    __slots__ = ("_future", "_made", "_make")

    def __init__(self, make: Callable[[], Masks]) -> None:
        self._make = make
        self._made: Masks | None = None
        self._future: Future[Masks] | None = None

    def make_on(self, thread: ThreadPoolExecutor) -> None:
        """Lets a thread make them."""
        self._future = thread.submit(self._make)

    def make(self) -> None:
        """Makes them here and now."""
        self._made = self._make()

    def leave(self) -> None:
        """Waits until none is being made."""
        if self._future is not None and not self._future.cancel():
            wait((self._future,))

    def result(self) -> Masks:
        """All of them. Raises what went wrong where another thread made them."""
        if self._future is not None:
            return self._future.result()
        assert self._made is not None
        return self._made


class _Progress:
    """A sequence's matcher, and how many tokens of the output it has seen."""

    __slots__ = ("_num_tokens", "matcher")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._num_tokens = 0

    def consume(self, output_token_ids: list[int]) -> int | None:
        """Brings the matcher up to an output, but that it has not followed the last token: that is
        returned. None where there is no new one."""
        new = output_token_ids[self._num_tokens :]
        if not new:
            return None
        *before, last = new
        self._num_tokens += len(new)
        self.matcher.advance(before)
        self.matcher.inner.consume_token(last)
        return last


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
        self._bits: Bits = np.zeros((0, self._num_words), np.uint32)
        self._address = 0
        self._eos_token_ids = tuple(eos_token_ids)
        self._progress: dict[int, _Progress] = {}
        self._cpus = available_cpus()

    def __len__(self) -> int:
        """Sequences that have a matcher."""
        return len(self._progress)

    def apply(self, plan: StepPlan) -> None:
        """Drops what is kept for sequences that the plan takes away, or introduces anew."""
        for sequence_id in plan.forgotten:
            self._progress.pop(sequence_id, None)
        for new in plan.new_sequences:
            self._progress.pop(new.sequence_id, None)

    @contextmanager
    def ahead(self, rows: Sequence[ConstrainedRow]) -> Iterator[MasksToCome]:
        """Makes the masks while the caller computes what they are for, if that leaves a CPU free;
        else before it. The threads of the model wait for one another some hundred times a step, and
        to interrupt one of them for a mask holds up all; and after it, the caches are full of its
        weights. None is being made any more when the context is left, whatever was raised in it.

        Args:
            rows: as for `masks`. Their outputs must not change within the context.
        """
        masks = MasksToCome(lambda: self.masks(rows))
        if self._cpus > torch.get_num_threads() and any(_constrained(rows)):
            masks.make_on(self._thread)
        else:
            masks.make()
        try:
            yield masks
        finally:
            masks.leave()

    def masks(self, rows: Sequence[ConstrainedRow]) -> Masks:
        """The masks for those of `rows` that are constrained."""
        constrained = _constrained(rows)
        bits, address = self._bits_of(len(constrained))
        if not constrained:
            return Masks({}, bits, [])
        ready: list[tuple[ConstrainedRow, Matcher]] = []
        taken: list[tuple[Matcher, int]] = []
        refused: list[tuple[int, str]] = []
        for row in constrained:
            try:
                progress = self._progress.get(row.sequence_id) or self._begun(row)
            except PagewireError as error:
                refused.append((row.sequence_id, error.message))
                continue
            token_id = progress.consume(row.output_token_ids)
            if token_id is not None:
                taken.append((progress.matcher, token_id))
            ready.append((row, progress.matcher))
        # One kind of work after the other here too: see `fill_masks`.
        for matcher, token_id in taken:
            matcher.follow(token_id)
        fill_masks([matcher for _, matcher in ready], bits, address)
        rows_of_bits: dict[int, int] = {}
        for index, (row, matcher) in enumerate(ready):
            if (fault := matcher.fault()) is not None:
                refused.append((row.sequence_id, fault))
                continue
            if row.params.min_tokens or row.params.ignore_eos:
                self._suspend_stops(bits[index], row)
            rows_of_bits[row.sequence_id] = index
        return Masks(rows_of_bits, bits[: len(ready)], refused)

    def _bits_of(self, num_rows: int) -> tuple[Bits, int]:
        """Room for the masks of a step, of any content, and its address. It is the same each time:
        to clear some hundred kilobytes, and to ask numpy where they are, takes as long as a mask.
        """
        if num_rows > len(self._bits):
            self._bits = np.zeros((2 * num_rows, self._num_words), np.uint32)
            self._address = self._bits.ctypes.data
        return self._bits[:num_rows], self._address

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-masks")

    def _begun(self, row: ConstrainedRow) -> _Progress:
        constraint = row.params.structured_output
        assert constraint is not None
        progress = _Progress(self._compiler.matcher(constraint, _room(row.params)))
        self._progress[row.sequence_id] = progress
        return progress

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


def _constrained(rows: Sequence[ConstrainedRow]) -> list[ConstrainedRow]:
    return [row for row in rows if row.params.structured_output is not None]


def _room(params: SamplingParams) -> int | None:
    """The tokens within which an output has to come to its end; None where it is not to, or might
    have to come to it before `min_tokens`."""
    if params.ignore_eos or params.max_tokens is None:
        return None
    if params.min_tokens and params.max_tokens - params.min_tokens < WATCHED:
        return None
    return params.max_tokens
