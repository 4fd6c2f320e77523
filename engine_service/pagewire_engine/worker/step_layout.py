"""What a step's plan becomes in the array that is sent to the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire_engine.step import StepPlan
from pagewire_engine.worker.device_batch import DeviceBatch, KnownSequence
from pagewire_engine.worker.staging import StepArray
from pagewire_kernels.gpu.batch_inputs import FROM_DEVICE, Parts

# Rows of a step, and the sequence of each.
Rows = Sequence[tuple[int, KnownSequence]]


@dataclass
class Samples:
    """Who takes a token from a step, and where the step's array says so.

    Attributes:
        sequences: R sequences, in the plan's order.
        rows: which of the L rows of logits each reads.
        last_of: the parts whose last row is one of these.
        rows_at, slots_at, holds_at: where arrays of R numbers each begin.
    """

    sequences: list[KnownSequence]
    rows: list[int]
    last_of: list[int]
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

    def add_to(self, array: StepArray, special: Rows) -> None:
        """Adds rows, slots and holds to the step's array."""
        holds = [0] * len(self.sequences)
        for row, sequence in special:
            holds[row] = int(sequence.is_held)
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


@dataclass(frozen=True)
class PartsLayout:
    """A step of any kind, as the device and its launches are told of it.

    Attributes:
        parts: what the device is told.
        starts: the first row of each part, and the end of the last.
        contexts: of each part, its own tokens included.
    """

    parts: Parts
    starts: list[int]
    contexts: list[int]

    @property
    def num_chunks(self) -> int:
        """Parts that are not decodes."""
        return self.parts.count - self.parts.num_decodes

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(self.contexts)


def add_parts(
    array: StepArray,
    plan: StepPlan,
    scheduled: list[KnownSequence],
    samples: Samples,
    block_size: int,
) -> PartsLayout:
    """Adds a step's parts to its array.

    Args:
        array: the step's.
        plan: the step's.
        scheduled: the sequence of each part.
        samples: who takes a token from it.
        block_size: tokens in a block.
    """
    starts = list(itertools.accumulate((part.num_tokens for part in plan.scheduled), initial=0))
    contexts = [part.start + part.num_tokens for part in plan.scheduled]
    one = itertools.takewhile(lambda part: part.num_tokens == 1, plan.scheduled)
    parts = Parts(
        records_at=array.add(part_records(plan, scheduled, starts)),
        tokens_at=array.add(token_ids(plan, scheduled)),
        wanted_at=array.add([starts[index + 1] - 1 for index in samples.last_of]),
        num_wanted=len(samples.last_of),
        count=len(scheduled),
        num_decodes=sum(1 for _ in one),
        num_tokens=starts[-1],
        longest=max(part.num_tokens for part in plan.scheduled),
        width=-(-max(contexts) // block_size),
        room=(len(scheduled), starts[-1]),
    )
    return PartsLayout(parts, starts, contexts)


def part_records(plan: StepPlan, scheduled: list[KnownSequence], starts: list[int]) -> list[int]:
    """See batch_inputs.PART_FIELDS."""
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
