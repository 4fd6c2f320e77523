"""What the worker remembers of sequences, and a step's plan as the arrays a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_kernels.attention import AttentionMetadata

_FIRST_ROWS = 64
_FIRST_WIDTH = 64


@dataclass(slots=True)
class SequenceState:
    """A sequence the worker knows.

    Attributes:
        new: how the engine introduced it; its output_token_ids are what it had then.
        output_token_ids: all produced so far; the worker appends what it samples, and to beams
            what the engine tells.
        row: its row of the block tables.
        num_blocks: entries of that row in use.
    """

    new: NewSequence
    output_token_ids: list[int]
    row: int
    num_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.new.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output."""
        prompt = self.new.prompt_token_ids
        num_prompt = len(prompt)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        if stop <= num_prompt:
            return prompt[start:stop]
        return prompt[start:] + self.output_token_ids[: stop - num_prompt]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's flat batch of T tokens.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        metadata: for attention.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


class InputBatch:
    """Token ids and block tables of all live sequences; block tables are rows of one array."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._sequences: dict[int, SequenceState] = {}
        self._tables: npt.NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)
        self._free_rows = list(range(_FIRST_ROWS))

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: int) -> SequenceState:
        return self._sequences[sequence_id]

    def apply(self, plan: StepPlan) -> None:
        """Takes over what the plan tells of sequences."""
        for sequence_id in plan.forgotten:
            self._forget(sequence_id)
        for new in plan.new_sequences:
            self._forget(new.sequence_id)
            if not self._free_rows:
                self._grow(2 * len(self._tables), self._tables.shape[1])
            self._sequences[new.sequence_id] = SequenceState(
                new, list(new.output_token_ids), self._free_rows.pop()
            )
        for sequence_id, token_id in plan.appended:
            self._sequences[sequence_id].output_token_ids.append(token_id)
        for scheduled in plan.scheduled:
            self._write_table(scheduled)

    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        """The arrays of a step whose plan has been applied."""
        block_size = self._block_size
        states = [self._sequences[part.sequence_id] for part in scheduled]
        token_ids: list[int] = []
        for part, state in zip(scheduled, states, strict=True):
            token_ids += state.tokens(part.start, part.start + part.num_tokens)
        starts = np.array([part.start for part in scheduled], np.int64)
        lengths = np.array([part.num_tokens for part in scheduled], np.int64)
        rows = np.array([state.row for state in states], np.int64)
        query_starts = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        contexts = (starts + lengths).astype(np.int32)
        tables = self._tables[rows, : -(-int(contexts.max()) // block_size)]
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
        owners = np.repeat(np.arange(len(scheduled)), lengths)
        slots = tables[owners, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        metadata = AttentionMetadata.from_host(
            query_start_locations=query_starts,
            context_lengths=contexts,
            block_tables=tables,
            slot_mapping=slots,
            num_decodes=_num_decodes(scheduled),
            device=self._device,
        )
        return StepInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            positions=torch.from_numpy(positions).to(self._device, non_blocking=True),
            metadata=metadata,
        )

    def _forget(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._tables[state.row, : state.num_blocks] = 0
            self._free_rows.append(state.row)

    def _write_table(self, scheduled: ScheduledSequence) -> None:
        state = self._sequences[scheduled.sequence_id]
        start = scheduled.table_start
        if not scheduled.block_ids and start == state.num_blocks:
            return  # most decodes: their last block has room
        end = start + len(scheduled.block_ids)
        if end > self._tables.shape[1]:
            self._grow(len(self._tables), max(end, 2 * self._tables.shape[1]))
        row = self._tables[state.row]
        row[start:end] = scheduled.block_ids
        row[end : state.num_blocks] = 0
        state.num_blocks = end

    def _grow(self, rows: int, width: int) -> None:
        grown = np.zeros((rows, width), np.int32)
        old_rows, old_width = self._tables.shape
        grown[:old_rows, :old_width] = self._tables
        self._tables = grown
        self._free_rows += range(old_rows, rows)


def _num_decodes(scheduled: Sequence[ScheduledSequence]) -> int:
    """How many one-token parts lead the batch."""
    for index, part in enumerate(scheduled):
        if part.num_tokens != 1:
            return index
    return len(scheduled)
