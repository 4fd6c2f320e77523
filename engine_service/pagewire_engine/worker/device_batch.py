"""What the host keeps of the sequences whose state is on the device, and what it must tell of them.

The device's state is by slot. A sequence has a slot from its first step on; it may lose it when
others need one, or when a step failed, and then everything is told anew. The host counts tokens
that are still being sampled, but need not know them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable

import torch

from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.staging import StepArray
from pagewire_kernels.gpu.batch_state import SPAN_FIELDS, BatchState, Changes
from pagewire_kernels.gpu.sampling_penalties import Penalties, PenaltyState


class KnownSequence:
    """A sequence that the worker was told of.

    Attributes:
        new: how the engine introduced it.
        sequence_id: the engine's number for it.
        output_token_ids: those that the host knows; the last ones may still be on the device.
        num_prompt: tokens of the prompt.
        num_tokens: of prompt and output, those that are still on the device included.
        block_ids: its block table.
        slot: its place on the device, or -1.
        loaded: whether the slot holds what is to be told of it, blocks apart.
        is_beam: whether the engine chooses its tokens.
        is_constrained: whether the host must say which tokens are allowed next.
        is_plain: whether nothing is asked of its steps but its tokens.
        scores_prompt: whether its prompt's log probabilities are asked for.
    """

    __slots__ = (
        "block_ids",
        "is_beam",
        "is_constrained",
        "is_plain",
        "loaded",
        "new",
        "num_prompt",
        "num_tokens",
        "output_token_ids",
        "scores_prompt",
        "sequence_id",
        "slot",
    )

    def __init__(self, new: NewSequence) -> None:
        params = new.sampling_params
        self.new = new
        self.sequence_id = new.sequence_id
        self.output_token_ids = list(new.output_token_ids)
        self.num_prompt = len(new.prompt_token_ids)
        self.num_tokens = self.num_prompt + len(new.output_token_ids)
        self.block_ids: list[int] = []
        self.slot = -1
        self.loaded = False
        self.is_beam = params.beam_search is not None
        self.is_constrained = params.structured_output is not None and not self.is_beam
        self.is_plain = not self.is_held and params.logprobs is None
        self.scores_prompt = params.prompt_logprobs is not None

    @property
    def is_held(self) -> bool:
        """Whether it does not go on from what its slot alone says: the device leaves it as it is
        until more is known."""
        return self.is_beam or self.is_constrained

    @property
    def num_output(self) -> int:
        """Tokens it has produced, those that are still on the device included."""
        return self.num_tokens - self.num_prompt

    @property
    def has_landed(self) -> bool:
        """Whether the host knows all of its tokens."""
        return self.num_prompt + len(self.output_token_ids) == self.num_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output, as far as the host knows them."""
        prompt, num_prompt = self.new.prompt_token_ids, self.num_prompt
        if stop <= num_prompt:
            return prompt[start:stop]
        output = self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]
        return prompt[start:] + output

    def write_blocks(self, part: ScheduledSequence) -> None:
        """Takes over the end of the block table that is news."""
        self.block_ids[part.table_start :] = part.block_ids


class DeviceBatch:
    """All known sequences, and the slots of those that have one.

    Args:
        max_num_seqs: most sequences of a step.
        width: most blocks of a sequence.
        vocab_size: tokens there are.
        eos_token_ids: end-of-sequence ids of the model.
        device: where the state is.

    Attributes:
        state: the device's, with slots for two steps: one that is under way, and the next.
        penalties: what changes logits, of the slots that have such.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        width: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device,
    ) -> None:
        num_slots = 2 * max_num_seqs
        self.state = BatchState.empty(num_slots, width, device)
        self.penalties = PenaltyState(
            vocab_size,
            num_slots,
            device,
            num_histories=max_num_seqs,
            num_biases=max_num_seqs,
        )
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, KnownSequence] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # What the next array must tell: block tables as (sequence, first column), and the rest.
        self._spans: list[tuple[KnownSequence, int]] = []
        self._loads: list[KnownSequence] = []
        self._num_demanding = 0
        self._num_scored = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: int) -> KnownSequence:
        return self._sequences[sequence_id]

    @property
    def all_plain(self) -> bool:
        """Whether nothing is asked of any sequence but its tokens."""
        return self._num_demanding == 0

    @property
    def scores_prompts(self) -> bool:
        """Whether log probabilities of some sequence's prompt are asked for."""
        return self._num_scored > 0

    def apply(self, plan: StepPlan) -> list[KnownSequence]:
        """Takes over what the plan tells of sequences. Returns those scheduled, in its order."""
        for sequence_id in plan.forgotten:
            self._forget(sequence_id)
        for new in plan.new_sequences:
            self._forget(new.sequence_id)
            sequence = self._sequences[new.sequence_id] = KnownSequence(new)
            self._num_demanding += not sequence.is_plain
            self._num_scored += sequence.scores_prompt
        for sequence_id, token_id in plan.appended:
            sequence = self._sequences[sequence_id]
            sequence.output_token_ids.append(token_id)
            sequence.num_tokens += 1
            sequence.loaded = False
        known = self._sequences
        scheduled = [known[part.sequence_id] for part in plan.scheduled]
        for part, sequence in zip(plan.scheduled, scheduled, strict=True):
            # Most decodes: their last block has room.
            if part.block_ids or part.table_start != len(sequence.block_ids):
                sequence.write_blocks(part)
                self._spans.append((sequence, part.table_start))
        return scheduled

    def place(
        self, plan: StepPlan, scheduled: list[KnownSequence], land: Callable[[], object]
    ) -> None:
        """Gives a slot to all sequences that the step computes or samples for.

        Args:
            plan: the step's.
            scheduled: what `apply` returned.
            land: waits for the step under way, so that what only it needs can be given up.
        """
        missing = [sequence for sequence in scheduled if not sequence.loaded]
        for part in plan.scheduled:
            if len(part.sample_for) > 1:
                several = (self._sequences[sequence_id] for sequence_id in part.sample_for)
                missing += [each for each in several if not each.loaded and each not in missing]
        for sequence in missing:
            if sequence.slot < 0:
                if not self._free_slots:
                    self._give_up_idle_slots(plan)
                sequence.slot = self._free_slots.pop()
                self._spans.append((sequence, 0))
            if not self.penalties.acquire(sequence.slot, self._penalties_of(sequence)):
                land()
                self._give_up_idle_slots(plan)
                if not self.penalties.acquire(sequence.slot, self._penalties_of(sequence)):
                    raise RuntimeError("a step has more sequences with penalties than it may have")
            sequence.loaded = True
            self._loads.append(sequence)

    def collect(self, array: StepArray, rows: list[int] | None) -> Changes:
        """Puts what the device must be told into the step's array.

        Args:
            array: the step's.
            rows: for a decode step, the slots of its rows, then as many holds, if they change.
        """
        spans: list[int] = []
        blocks: list[int] = []
        for sequence, first in self._spans:
            told = sequence.block_ids[first:]
            if told and sequence.slot >= 0:
                spans += (sequence.slot, first, len(blocks), len(told))
                blocks += told
        loads: list[int] = []
        for sequence in self._loads:
            loads += self._record(sequence)
        changes = Changes(
            spans_at=array.add(spans),
            num_spans=len(spans) // SPAN_FIELDS,
            blocks_at=array.add(blocks),
            loads_at=array.add(loads),
            num_loads=len(self._loads),
            rows_at=array.add(rows or []),
            num_rows=len(rows or []) // 2,
        )
        self._spans.clear()
        self._loads.clear()
        return changes

    def lose(self, plan: StepPlan) -> None:
        """What the device holds of the plan's sequences is in doubt: tell it anew next time."""
        self._spans.clear()
        self._loads.clear()
        for part in plan.scheduled:
            for sequence_id in (part.sequence_id, *part.sample_for):
                if (sequence := self._sequences.get(sequence_id)) is not None:
                    self._give_up_slot(sequence)

    def _forget(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._num_demanding -= not sequence.is_plain
            self._num_scored -= sequence.scores_prompt
            self._give_up_slot(sequence)

    def _give_up_slot(self, sequence: KnownSequence) -> None:
        slot, sequence.slot, sequence.loaded = sequence.slot, -1, False
        if slot >= 0:
            self.penalties.release(slot)
            self._free_slots.append(slot)

    def _give_up_idle_slots(self, plan: StepPlan) -> None:
        """Frees the slots of sequences that have no part in the step: swapped ones, as a rule."""
        needed = {sequence_id for part in plan.scheduled for sequence_id in part.sample_for}
        needed.update(part.sequence_id for part in plan.scheduled)
        for sequence_id, sequence in self._sequences.items():
            if sequence.has_landed and sequence_id not in needed:
                self._give_up_slot(sequence)

    def _penalties_of(self, sequence: KnownSequence) -> Penalties:
        params = sequence.new.sampling_params
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._eos_token_ids
        return Penalties(
            prompt_token_ids=sequence.new.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            # A constraint's mask takes stops away itself, where it leaves anything else.
            min_tokens=0 if sequence.is_constrained else params.min_tokens,
            suspended_token_ids=[stop for stop in stops if 0 <= stop < self._vocab_size],
            bias=params.logit_bias,
        )

    def _record(self, sequence: KnownSequence) -> Iterable[int]:
        """See batch_state.LOAD_FIELDS."""
        new, params = sequence.new, sequence.new.sampling_params
        if not sequence.has_landed:
            raise RuntimeError(f"sequence {new.sequence_id} has tokens that have not landed")
        position = sequence.num_tokens - 1
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        return (
            sequence.slot,
            sequence.tokens(position, position + 1)[0],
            position,
            _bits(params.temperature),
            _bits(params.min_p),
            top_k,
            _bits(params.top_p),
            _signed(new.seed & 0xFFFFFFFF),
            _signed((new.seed >> 32) & 0xFFFFFFFF),
            new.sequence_index,
            sequence.num_output,
        )


def _bits(value: float) -> int:
    """A float32's bits as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _signed(word: int) -> int:
    """A 32-bit word as an int32."""
    return word - (1 << 32) if word >= 1 << 31 else word
