"""The inputs of a step on the device, and the kernels that make them from the sequences' state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire_kernels.gpu.batch_state import BatchState
from pagewire_kernels.gpu.launch import launch
from pagewire_kernels.gpu.sampling import PADDING

# Fields of a part of a step: slot, start, first row, tokens.
PART_FIELDS = 4
# A token that the device knows and the host does not: the slot's last one.
FROM_DEVICE = -1

_COLUMNS = 1024


@dataclass(frozen=True)
class BatchInputs:
    """Where a step's inputs are made, for at most R sequences and T tokens, R <= T.

    Attributes:
        slots: int32 [R], the sequences of a decode step; PADDING where there is none.
        holds: int32 [R], 1 where a decode step does not advance the sequence.
        token_ids: int64 [T].
        positions: int64 [T].
        slot_mapping: int64 [T]; -1 in rows of padding.
        context_lengths: int32 [R]; 0 in rows of padding.
        query_starts: int32 [R + 1], of a step of any kind.
        num_decodes: int32 [1], of a step of any kind.
        wanted_rows: int32 [R], the rows of such a step that are sampled from; then 0.
        row_starts: int32 [R + 1], of a decode step: 0, 1, 2, ...
        block_tables: int32 [R, W]; what lies beyond a context means nothing.
        sampled: int32 [R], what `sampling.sample` has chosen.
    """

    slots: torch.Tensor
    holds: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lengths: torch.Tensor
    query_starts: torch.Tensor
    num_decodes: torch.Tensor
    wanted_rows: torch.Tensor
    row_starts: torch.Tensor
    block_tables: torch.Tensor
    sampled: torch.Tensor

    @classmethod
    def empty(
        cls, num_sequences: int, num_tokens: int, width: int, device: torch.device
    ) -> BatchInputs:
        """For so many sequences and tokens, block tables of `width` blocks."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            slots=torch.full((num_sequences,), PADDING, dtype=torch.int32, device=device),
            holds=zeros(num_sequences),
            token_ids=zeros(num_tokens, dtype=torch.int64),
            positions=zeros(num_tokens, dtype=torch.int64),
            slot_mapping=zeros(num_tokens, dtype=torch.int64),
            context_lengths=zeros(num_sequences),
            query_starts=zeros(num_sequences + 1),
            num_decodes=zeros(1),
            wanted_rows=zeros(num_sequences),
            row_starts=torch.arange(num_sequences + 1, dtype=torch.int32, device=device),
            block_tables=zeros(num_sequences, width),
            sampled=zeros(num_sequences),
        )

    def clear(self) -> None:
        """Makes a step of it in which there is nothing to compute, of either kind."""
        self.slots.fill_(PADDING)
        self.slot_mapping.fill_(-1)
        for tensor in (self.holds, self.context_lengths, self.query_starts):
            tensor.zero_()
        for tensor in (self.num_decodes, self.wanted_rows):
            tensor.zero_()


@dataclass(frozen=True, slots=True)
class Parts:
    """What `prepare_parts` is told of a step.

    Attributes:
        records_at: where in the step's array the parts' records of PART_FIELDS begin.
        tokens_at: where the token ids begin, in the order of rows; FROM_DEVICE stands for the last
            token of the slot.
        wanted_at, num_wanted: where the rows begin that are sampled from, and how many they are.
        count: sequences in the step.
        num_decodes: the first so many have one token each.
        num_tokens: of all.
        longest: tokens of the longest part.
        width: blocks of the longest context.
        room: (sequences, tokens) that the inputs are read as, in a graph that serves steps of many
            sizes; what is beyond the step's own is padding.
    """

    records_at: int
    tokens_at: int
    wanted_at: int
    num_wanted: int
    count: int
    num_decodes: int
    num_tokens: int
    longest: int
    width: int
    room: tuple[int, int]


def prepare_decodes(state: BatchState, inputs: BatchInputs, num_rows: int, block_size: int) -> None:
    """Makes the inputs of a decode step from the state and `inputs.slots` alone.

    Args:
        state: of all slots.
        inputs: the step's.
        num_rows: rows of the batch, padding included.
        block_size: tokens in a block.
    """
    width = inputs.block_tables.shape[1]
    launch(
        _prepare_decodes,
        (num_rows, triton.cdiv(width, _COLUMNS)),
        inputs.slots,
        state.last_token,
        state.last_position,
        state.block_tables,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.context_lengths,
        inputs.block_tables,
        width,
        BLOCK_SIZE=block_size,
        COLUMNS=_COLUMNS,
    )


def prepare_parts(
    state: BatchState, inputs: BatchInputs, packed: torch.Tensor, parts: Parts, block_size: int
) -> None:
    """Makes the inputs of a step of any kind.

    Args:
        state: of all slots.
        inputs: the step's; `slots`, `holds` and `sampled` stay as they are.
        packed: int32, the step's array.
        parts: what of it to read.
        block_size: tokens in a block.
    """
    sequences, tokens = parts.room
    most = max(parts.longest, parts.width, sequences, tokens - parts.num_tokens)
    launch(
        _prepare_parts,
        (parts.count + 1, triton.cdiv(most, _COLUMNS)),
        packed,
        parts.records_at,
        parts.tokens_at,
        parts.wanted_at,
        parts.num_wanted,
        parts.count,
        parts.num_decodes,
        parts.num_tokens,
        sequences,
        tokens,
        state.last_token,
        state.block_tables,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.context_lengths,
        inputs.query_starts,
        inputs.num_decodes,
        inputs.wanted_rows,
        inputs.block_tables,
        inputs.block_tables.stride(0),
        FIELDS=PART_FIELDS,
        FROM_DEVICE=FROM_DEVICE,
        BLOCK_SIZE=block_size,
        COLUMNS=_COLUMNS,
    )


@triton.jit(do_not_specialize=["width"])
def _prepare_decodes(
    row_slots: tl.tensor,
    last_token: tl.tensor,
    last_position: tl.tensor,
    tables: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    context_lengths: tl.tensor,
    row_tables: tl.tensor,
    width: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A row, and so many columns of its block table."""
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    used = slot >= 0
    slot = tl.maximum(slot, 0).to(tl.int64)
    context = tl.where(used, tl.load(last_position + slot) + 1, 0)
    table = tables + slot * width
    if tl.program_id(1) == 0:
        position = tl.maximum(context - 1, 0)
        token = tl.where(used, tl.load(last_token + slot), 0)
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        place = tl.where(used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(token_ids + row, token.to(tl.int64))
        tl.store(positions + row, position.to(tl.int64))
        tl.store(slot_mapping + row, place)
        tl.store(context_lengths + row, context)
    first = tl.program_id(1) * COLUMNS
    num_blocks = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    if first < num_blocks:
        column = first + tl.arange(0, COLUMNS)
        mask = column < num_blocks
        blocks = tl.load(table + column, mask=mask, other=0)
        tl.store(row_tables + row.to(tl.int64) * width + column, blocks, mask=mask)


@triton.jit(
    do_not_specialize=[
        "records_at", "tokens_at", "wanted_at", "num_wanted", "num_parts", "num_decodes",
        "num_tokens", "room_sequences", "room_tokens", "table_stride",
    ]
)  # fmt: skip
def _prepare_parts(
    packed: tl.tensor,
    records_at: tl.tensor,
    tokens_at: tl.tensor,
    wanted_at: tl.tensor,
    num_wanted: tl.tensor,
    num_parts: tl.tensor,
    num_decodes: tl.tensor,
    num_tokens: tl.tensor,
    room_sequences: tl.tensor,
    room_tokens: tl.tensor,
    last_token: tl.tensor,
    tables: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    context_lengths: tl.tensor,
    query_starts: tl.tensor,
    decodes: tl.tensor,
    wanted_rows: tl.tensor,
    row_tables: tl.tensor,
    table_stride: tl.tensor,
    FIELDS: tl.constexpr,
    FROM_DEVICE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """So many tokens of a part, and so many columns of its block table; behind the last part, so
    much of the padding and of the wanted rows."""
    part = tl.program_id(0)
    index = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if part == num_parts:
        if tl.program_id(1) == 0:
            tl.store(decodes, num_decodes)
        wanted = tl.load(packed + wanted_at + index, mask=index < num_wanted, other=0)
        tl.store(wanted_rows + index, wanted, mask=index < room_sequences)
        sequence = num_parts + index
        mask = sequence < room_sequences
        tl.store(context_lengths + sequence, tl.zeros_like(index), mask=mask)
        tl.store(query_starts + sequence + 1, tl.zeros_like(index) + num_tokens, mask=mask)
        row = num_tokens + index
        mask = row < room_tokens
        tl.store(slot_mapping + row, tl.zeros_like(index).to(tl.int64) - 1, mask=mask)
    else:
        record = packed + records_at + FIELDS * part
        slot = tl.load(record).to(tl.int64)
        start = tl.load(record + 1)
        first_row = tl.load(record + 2)
        own_tokens = tl.load(record + 3)
        context = start + own_tokens
        table = tables + slot * table_stride
        if tl.program_id(1) == 0:
            tl.store(context_lengths + part, context)
            tl.store(query_starts + part, first_row)
            tl.store(query_starts + part + 1, first_row + own_tokens)
        mask = index < own_tokens
        row = first_row + index
        token = tl.load(packed + tokens_at + row, mask=mask, other=0)
        token = tl.where(token == FROM_DEVICE, tl.load(last_token + slot), token)
        position = start + index
        block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        tl.store(token_ids + row, token.to(tl.int64), mask=mask)
        tl.store(positions + row, position.to(tl.int64), mask=mask)
        tl.store(slot_mapping + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
        mask = index < (context + BLOCK_SIZE - 1) // BLOCK_SIZE
        blocks = tl.load(table + index, mask=mask, other=0)
        tl.store(row_tables + part.to(tl.int64) * table_stride + index, blocks, mask=mask)
