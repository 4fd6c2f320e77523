"""What a step's plan becomes in the array that is sent to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire_engine.step import StepPlan
from pagewire_engine.worker.device_batch import DeviceBatch, KnownSequence
from pagewire_engine.worker.staging import StepArray
from pagewire_kernels.gpu.batch_state import FROM_DEVICE

# Rows of a step, and the sequence of each.
Rows = Sequence[tuple[int, KnownSequence]]


@dataclass
class Samples:
    """Who takes a token from a step, and where the step's array says so.

    Attributes:
        sequences: R sequences, in the plan's order.
        rows: which of the L rows of logits each reads.
        last_of: the parts whose last row is one of these.
        last_at, rows_at, slots_at, holds_at: where the arrays begin: L rows of the hidden states,
            and R numbers each.
    """

    sequences: list[KnownSequence]
    rows: list[int]
    last_of: list[int]
    last_at: int = 0
    rows_at: int = 0
    slots_at: int = 0
    holds_at: int = 0

    @classmethod
    def of(cls, plan: StepPlan, batch: DeviceBatch) -> Samples:
        samples = cls([], [], [])
        for index, part in enumerate(plan.scheduled):
            for sequence_id in part.sample_for:
                samples.sequences.append(batch[sequence_id])
                samples.rows.append(len(samples.last_of))
            if part.sample_for:
                samples.last_of.append(index)
        return samples

    def add_to(self, array: StepArray, starts: list[int], special: Rows) -> None:
        """Adds the four to the step's array."""
        holds = [0] * len(self.sequences)
        for row, sequence in special:
            holds[row] = int(sequence.is_held)
        self.last_at = array.add([starts[index + 1] - 1 for index in self.last_of])
        self.rows_at = array.add(self.rows)
        self.slots_at = array.add([sequence.slot for sequence in self.sequences])
        self.holds_at = array.add(holds)


def all_decode(plan: StepPlan, scheduled: list[KnownSequence]) -> bool:
    """Whether each sequence computes its last token, and samples the next for itself alone."""
    for part, sequence in zip(plan.scheduled, scheduled, strict=True):
        if part.num_tokens != 1 or part.start != sequence.num_tokens - 1:
            return False
        if len(part.sample_for) != 1 or part.sample_for[0] != part.sequence_id:
            return False
    return True


def part_records(plan: StepPlan, scheduled: list[KnownSequence], starts: list[int]) -> list[int]:
    """See batch_state.PART_FIELDS."""
    records: list[int] = []
    for part, sequence, row in zip(plan.scheduled, scheduled, starts, strict=False):
        records += (sequence.slot, part.start, row, part.num_tokens)
    return records


def token_ids(plan: StepPlan, scheduled: list[KnownSequence]) -> list[int]:
    """The step's tokens, in the order of rows."""
    numbers: list[int] = []
    for part, sequence in zip(plan.scheduled, scheduled, strict=True):
        end = part.start + part.num_tokens
        known = end - (end == sequence.num_tokens)
        numbers += sequence.tokens(part.start, known)
        if known < end:
            numbers.append(FROM_DEVICE)
    return numbers
