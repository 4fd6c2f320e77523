"""The state of all sequences on the device, by slot, and the kernel that takes up what changes.

A decode step needs nothing from the host: its token, its position and its place in the cache follow
from what the step before left here. What does change comes as one int32 array a step, whose parts
the kernels find by their offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire_kernels.gpu.launch import launch
from pagewire_kernels.gpu.sampling import SamplingColumns

# Fields of a loaded slot's record, in their order: slot, last token, its position, temperature,
# min_p, top_k, top_p, the seed's low and high half, sequence index, output position.
LOAD_FIELDS = 11
# Fields of a span of block table: slot, first column, where its blocks are, how many.
SPAN_FIELDS = 4

_BLOCK = 256


@dataclass(frozen=True)
class BatchState:
    """What the device knows of S sequences, by slot.

    Attributes:
        last_token: int32 [S], the last token of prompt + output, sampled ones included.
        last_position: int32 [S], its position.
        block_tables: int32 [S, W].
        sampling: how each is sampled; `position` counts its output tokens.
    """

    last_token: torch.Tensor
    last_position: torch.Tensor
    block_tables: torch.Tensor
    sampling: SamplingColumns

    @classmethod
    def empty(cls, num_slots: int, width: int, device: torch.device) -> BatchState:
        """Of `num_slots` slots, block tables of `width` blocks."""

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=device)

        return cls(
            last_token=column(torch.int32),
            last_position=column(torch.int32),
            block_tables=torch.zeros((num_slots, width), dtype=torch.int32, device=device),
            sampling=SamplingColumns(
                temperature=column(torch.float32),
                min_p=column(torch.float32),
                top_k=column(torch.int32),
                top_p=column(torch.float32),
                seed=column(torch.int64),
                sequence_index=column(torch.int32),
                position=column(torch.int32),
            ),
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """Where the parts of `packed` that `apply_changes` reads begin, and how long they are.

    Attributes:
        spans_at, num_spans: records of SPAN_FIELDS; a span's blocks are counted from blocks_at.
        blocks_at: block ids.
        loads_at, num_loads: records of LOAD_FIELDS; floats as their bits.
        rows_at, num_rows: slots of a decode step's rows, then as many holds.
    """

    spans_at: int
    num_spans: int
    blocks_at: int
    loads_at: int
    num_loads: int
    rows_at: int
    num_rows: int


def apply_changes(
    state: BatchState,
    packed: torch.Tensor,
    changes: Changes,
    row_slots: torch.Tensor,
    row_holds: torch.Tensor,
) -> None:
    """Writes what the host tells to the state, and which sequences a decode step has to its inputs.

    Args:
        state: of all slots.
        packed: int32, the step's array.
        changes: what of it to read.
        row_slots, row_holds: `slots` and `holds` of the step's inputs.
    """
    entries = max(changes.num_loads, changes.num_rows)
    programs = changes.num_spans + triton.cdiv(entries, _BLOCK)
    sampling = state.sampling
    launch(
        _apply_changes,
        (programs,),
        packed,
        changes.spans_at,
        changes.num_spans,
        changes.blocks_at,
        changes.loads_at,
        changes.num_loads,
        changes.rows_at,
        changes.num_rows,
        state.block_tables,
        state.block_tables.stride(0),
        state.last_token,
        state.last_position,
        sampling.temperature,
        sampling.min_p,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,
        sampling.sequence_index,
        sampling.position,
        row_slots,
        row_holds,
        FIELDS=LOAD_FIELDS,
        SPAN=SPAN_FIELDS,
        BLOCK=_BLOCK,
    )


@triton.jit(
    do_not_specialize=[
        "spans_at", "num_spans", "blocks_at", "loads_at", "num_loads", "rows_at", "num_rows",
        "table_stride",
    ]
)  # fmt: skip
def _apply_changes(
    packed: tl.tensor,
    spans_at: tl.tensor,
    num_spans: tl.tensor,
    blocks_at: tl.tensor,
    loads_at: tl.tensor,
    num_loads: tl.tensor,
    rows_at: tl.tensor,
    num_rows: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    last_token: tl.tensor,
    last_position: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    seed: tl.tensor,
    sequence_index: tl.tensor,
    output_position: tl.tensor,
    row_slots: tl.tensor,
    row_holds: tl.tensor,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The first programs write a span of block table each, the others slots and rows."""
    program = tl.program_id(0)
    if program < num_spans:
        span = packed + spans_at + SPAN * program
        owner = tl.load(span).to(tl.int64)
        column = tl.load(span + 1)
        blocks = packed + blocks_at + tl.load(span + 2)
        count = tl.load(span + 3)
        start = count * 0
        while start < count:
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < count
            block = tl.load(blocks + offsets, mask=mask, other=0)
            tl.store(tables + owner * table_stride + column + offsets, block, mask=mask)
            start += BLOCK
    else:
        entry = (program - num_spans) * BLOCK + tl.arange(0, BLOCK)
        mask = entry < num_loads
        record = packed + loads_at + FIELDS * entry
        slot = tl.load(record, mask=mask, other=0)
        tl.store(last_token + slot, tl.load(record + 1, mask=mask, other=0), mask=mask)
        tl.store(last_position + slot, tl.load(record + 2, mask=mask, other=0), mask=mask)
        bits = tl.load(record + 3, mask=mask, other=0)
        tl.store(temperature + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        bits = tl.load(record + 4, mask=mask, other=0)
        tl.store(min_p + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        tl.store(top_k + slot, tl.load(record + 5, mask=mask, other=0), mask=mask)
        bits = tl.load(record + 6, mask=mask, other=0)
        tl.store(top_p + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        low = tl.load(record + 7, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(record + 8, mask=mask, other=0).to(tl.int64)
        tl.store(seed + slot, (high << 32) | low, mask=mask)
        tl.store(sequence_index + slot, tl.load(record + 9, mask=mask, other=0), mask=mask)
        tl.store(output_position + slot, tl.load(record + 10, mask=mask, other=0), mask=mask)
        mask = entry < num_rows
        row = packed + rows_at + entry
        tl.store(row_slots + entry, tl.load(row, mask=mask, other=0), mask=mask)
        tl.store(row_holds + entry, tl.load(row + num_rows, mask=mask, other=0), mask=mask)
