"""Which tokens the constraints of sequences allow next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pagewire.errors import PagewireError
from pagewire.sampling_params import SamplingParams
from pagewire_engine.cpus import available_cpus
from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.step import StepPlan
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.wind_down import WATCHED

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
        bits: uint32 [M, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 is set where token t is
            allowed. No row that `rows` names is empty.
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
    """The masks of a step that is being computed. A thread makes one after the other, and whoever
    asks for them makes some too.

    Args:
        rows: N constrained ones.
        bits: uint32 [N, ceil(vocab_size / 32)], zeros.
        make: makes a row's mask, and tells why if it can't.
        submit: lets a thread call something.
    """

    __slots__ = ("_bits", "_left", "_made", "_make", "_reasons", "_rows", "_submit")

    def __init__(
        self,
        rows: Sequence[ConstrainedRow],
        bits: Bits,
        make: Callable[[ConstrainedRow, Bits], str | None],
        submit: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        self._rows = rows
        self._bits = bits
        self._make = make
        self._left = deque(range(len(rows)))
        self._reasons: list[str | None] = [None] * len(rows)
        self._submit = submit
        self._made: Future[None] | None = None

    def begin(self) -> None:
        """Lets the thread make them."""
        if self._made is None:
            self._made = self._submit(self._make_some)

    def _make_some(self) -> None:
        """Makes what nobody else does."""
        while self._left:
            try:
                index = self._left.popleft()
            except IndexError:
                return
            self._reasons[index] = self._make(self._rows[index], self._bits[index])

    def leave(self) -> None:
        """Begins none any more, and waits for the one that is being made."""
        self._left.clear()
        if self._made is not None:
            wait((self._made,))

    def result(self) -> Masks:
        """All of them. Raises what went wrong in making one."""
        if len(self._left) > 1:
            self.begin()
        self._make_some()
        if self._made is not None:
            self._made.result()
        rows = {row.sequence_id: index for index, row in enumerate(self._rows)}
        refused: list[tuple[int, str]] = []
        for row, reason in zip(self._rows, self._reasons, strict=True):
            if reason is not None:
                del rows[row.sequence_id]
                refused.append((row.sequence_id, reason))
        return Masks(rows, self._bits, refused)


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
        self._thread: ThreadPoolExecutor | None = None
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
        """Makes the masks while the caller computes what they are for, if that leaves a CPU free:
        the threads of the model wait for one another some hundred times a step, and to interrupt
        one of them for a mask holds up all. None is being made any more when the context is left,
        whatever was raised in it.

        Args:
            rows: as for `masks`. Their outputs must not change within the context.
        """
        constrained = _constrained(rows)
        masks = MasksToCome(
            constrained, self._no_masks(len(constrained)), self._make, self._on_thread
        )
        if constrained and self._cpus > torch.get_num_threads():
            masks.begin()
        try:
            yield masks
        finally:
            masks.leave()

    def masks(self, rows: Sequence[ConstrainedRow]) -> Masks:
        """The masks for those of `rows` that are constrained, several at a time."""
        constrained = _constrained(rows)
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
        bits = self._no_masks(len(ready))
        if matchers:
            self._compiler.fill(matchers, bits)
        rows_of_bits: dict[int, int] = {}
        for index, (row, matcher) in enumerate(zip(ready, matchers, strict=True)):
            if (fault := self._settle(row, matcher, bits[index])) is not None:
                refused.append((row.sequence_id, fault))
            else:
                rows_of_bits[row.sequence_id] = index
        return Masks(rows_of_bits, bits, refused)

    def _on_thread(self, call: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        return self._thread.submit(call)

    def _no_masks(self, rows: int) -> Bits:
        return np.zeros((rows, self._num_words), np.uint32)

    def _make(self, row: ConstrainedRow, bits: Bits) -> str | None:
        """Makes a row's mask in zeros, and tells why if it can't."""
        try:
            matcher = self._matcher(row)
        except PagewireError as error:
            return error.message
        matcher.fill_timed(bits)
        return self._settle(row, matcher, bits)

    def _settle(self, row: ConstrainedRow, matcher: Matcher, bits: Bits) -> str | None:
        """Makes what the grammar allows what the row may take, or tells why nothing can be."""
        if (fault := matcher.fault()) is None:
            self._suspend_stops(bits, row)
        return fault

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
