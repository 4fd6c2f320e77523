"""LoRA on CUDA: tables of a fixed size, so that a CUDA graph finds every adapter where it was.

A program takes some rows and one slot, and ends at once where none of the rows has that slot: slots
are read on the device, and no sorting is needed (compare Punica's BGMV, Chen et al., MLSys 2024).
Shrink: its inputs are cut into stretches, so that few rows still make enough programs; what each
stretch gives is added by the expansion, always in one order. A row's result does not depend on
what is computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagewire_kernels.gpu.launch import launch
from pagewire_kernels.lora import (
    LoraBackend,
    LoraPair,
    LoraRows,
    LoraShape,
    LoraTable,
    PackedLora,
    TorchPacked,
)

# tl.dot takes no less.
_LEAST = 16
_ROWS = 16
# Columns of a matrix that a program has at a time, beside all ranks; and numbers that this may be:
# more of fp32 would not fit into shared memory.
_COLUMNS = 64
_MOST_NUMBERS = 8192
# Stretches of a shrink's inputs: of at least so many numbers, and so many at most.
_STRETCH = 512
_MOST_STRETCHES = 8


class TritonLora(LoraBackend):
    """Tables in the device's memory, all of it taken when they are made."""

    def pack(
        self,
        shape: LoraShape,
        pairs: Sequence[LoraPair | None],
        dtype: torch.dtype,
        *,
        embedding: bool = False,
    ) -> TorchPacked:
        narrowed = [
            None
            if pair is None
            else LoraPair(_pinned(pair.down, dtype), _pinned(pair.up, dtype), pair.scale)
            for pair in pairs
        ]
        return TorchPacked(narrowed)

    def table(
        self,
        shape: LoraShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embedding: bool = False,
    ) -> TritonTable:
        return TritonTable(shape, num_slots, max_rank, dtype, device, embedding=embedding)


class TritonTable(LoraTable):
    """The adapters of one linear, by slot.

    `down` is [slots, parts * R, inputs] (of an embedding [slots, num_embeddings, R]) and `up`
    [slots, outputs, R], where R is the highest rank, a power of two; ranks below it are filled up
    with zeros.
    """

    def __init__(
        self,
        shape: LoraShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embedding: bool,
    ) -> None:
        self._shape = shape
        self._num_slots = num_slots
        self._rank = max(_LEAST, triton.next_power_of_2(max_rank))
        self._columns = max(_LEAST, min(_COLUMNS, _MOST_NUMBERS // self._rank))
        self._embedding = embedding
        num_ranks = len(shape.parts) * self._rank
        sizes = (shape.inputs, self._rank) if embedding else (num_ranks, shape.inputs)
        self._down = torch.zeros((num_slots, *sizes), dtype=dtype, device=device)
        self._up = torch.zeros((num_slots, shape.outputs, self._rank), dtype=dtype, device=device)
        # Of each part; 0: the slot's adapter has none, and its programs end at once.
        self._scales = torch.zeros((num_slots, len(shape.parts)), device=device)
        ends = torch.tensor(shape.parts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._ends = ends.to(device)
        self.slot_bytes = self._down[0].nbytes + self._up[0].nbytes

    def put(self, slot: int, packed: PackedLora | None) -> None:
        """See LoraTable. Queued behind the steps that use the slot's adapter before."""
        if packed is None:
            self._scales[slot].zero_()
            return
        self._up[slot].zero_()
        self._down[slot].zero_()
        scales: list[float] = []
        start = 0
        for part, (size, pair) in enumerate(zip(self._shape.parts, packed.pairs(), strict=True)):
            scales.append(0.0 if pair is None else pair.scale)
            if pair is not None:
                first = part * self._rank
                place = self._down[slot, first : first + pair.rank]
                if self._embedding:
                    place = self._down[slot, :, : pair.rank].t()
                place.copy_(pair.down, non_blocking=True)
                self._up[slot, start : start + size, : pair.rank].copy_(pair.up, non_blocking=True)
            start += size
        self._scales[slot].copy_(torch.tensor(scales))

    def add(self, hidden: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        num_rows, inputs = hidden.shape
        num_parts, rank = len(self._shape.parts), self._rank
        stretches = min(_MOST_STRETCHES, max(1, inputs // _STRETCH))
        stretch = -(-inputs // (stretches * self._columns)) * self._columns
        shrunk = hidden.new_empty((stretches, num_rows, num_parts * rank), dtype=torch.float32)
        blocks = -(-num_rows // _ROWS)
        launch(
            lora_shrink,
            (blocks * num_parts, self._num_slots, stretches),
            hidden,
            self._down,
            self._scales,
            rows.slots,
            shrunk,
            num_rows,
            inputs,
            hidden.stride(0),
            stretch,
            PARTS=num_parts,
            RANK=rank,
            ROWS=_ROWS,
            INPUTS=self._columns,
            num_warps=4,
        )
        self._expand(shrunk, output, rows)

    def add_embedded(self, ids: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        # Rows without an adapter read slot 0, and what they read is not looked at.
        slots = rows.slots.clamp(min=0).long()
        self._expand(self._down[slots, ids].float().unsqueeze(0), output, rows)

    def _expand(self, shrunk: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        stretches, num_rows, _ = shrunk.shape
        size = self._shape.outputs
        launch(
            lora_expand,
            (-(-num_rows // _ROWS), -(-size // self._columns), self._num_slots),
            shrunk,
            self._up,
            self._scales,
            self._ends,
            rows.slots,
            output,
            num_rows,
            size,
            output.stride(0),
            stretches,
            PARTS=len(self._shape.parts),
            RANK=self._rank,
            ROWS=_ROWS,
            OUTPUTS=self._columns,
            num_warps=4,
        )


def _pinned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In memory that the device copies from without a wait for the host."""
    narrow = tensor.to(dtype).contiguous()
    return narrow.pin_memory() if torch.cuda.is_available() else narrow


@triton.jit
def lora_shrink(
    hidden_ptr: tl.tensor,
    down_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    num_rows: tl.tensor,
    inputs: tl.tensor,
    hidden_stride: tl.tensor,
    stretch: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """shrunk[stretch, row, part] = hidden[row, stretch] . down[slot, part, stretch]."""
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    slot, number = tl.program_id(1), tl.program_id(2)
    rows = block * ROWS + tl.arange(0, ROWS)
    mine = tl.load(slots_ptr + rows, rows < num_rows, other=-1) == slot
    scale = tl.load(scales_ptr + slot * PARTS + part)
    if (tl.sum(mine.to(tl.int32)) > 0) & (scale != 0):
        ranks = tl.arange(0, RANK)
        down = down_ptr + (slot.to(tl.int64) * PARTS * RANK + part * RANK + ranks) * inputs
        x = hidden_ptr + rows.to(tl.int64) * hidden_stride
        first = number * stretch
        last = tl.minimum(first + stretch, inputs)
        sums = tl.zeros((ROWS, RANK), tl.float32)
        for start in range(first, last, INPUTS):
            columns = start + tl.arange(0, INPUTS)
            inside = columns < last
            values = tl.load(
                x[:, None] + columns[None, :], mine[:, None] & inside[None, :], other=0.0
            )
            weights = tl.load(down[None, :] + columns[:, None], inside[:, None], other=0.0)
            sums += tl.dot(values, weights, input_precision="ieee")
        to = shrunk_ptr + (number * num_rows + rows).to(tl.int64) * PARTS * RANK + part * RANK
        tl.store(to[:, None] + ranks[None, :], sums, mine[:, None])


@triton.jit
def lora_expand(
    shrunk_ptr: tl.tensor,
    up_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    output_stride: tl.tensor,
    stretches: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """output[row] += scale * up[slot] shrunk[row], part by part; a block of outputs may lie in
    several parts."""
    slot = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(slots_ptr + rows, rows < num_rows, other=-1) == slot
    if tl.sum(mine.to(tl.int32)) > 0:
        first = tl.program_id(1) * OUTPUTS
        columns = first + tl.arange(0, OUTPUTS)
        ranks = tl.arange(0, RANK)
        up = up_ptr + (slot.to(tl.int64) * size + columns) * RANK
        begin = 0
        for part in tl.static_range(PARTS):
            end = tl.load(ends_ptr + part)
            scale = tl.load(scales_ptr + slot * PARTS + part)
            if (scale != 0) & (first < end) & (first + OUTPUTS > begin):
                inside = (columns >= begin) & (columns < end)
                sums = tl.zeros((ROWS, RANK), tl.float32)
                for number in tl.range(0, stretches):
                    at = (number * num_rows + rows).to(tl.int64) * PARTS * RANK + part * RANK
                    sums += tl.load(
                        shrunk_ptr + at[:, None] + ranks[None, :], mine[:, None], other=0.0
                    )
                weights = tl.load(up[None, :] + ranks[:, None], inside[None, :], other=0.0)
                product = tl.dot(sums.to(weights.dtype), weights, input_precision="ieee") * scale
                place = output_ptr + rows.to(tl.int64)[:, None] * output_stride + columns[None, :]
                held = mine[:, None] & inside[None, :]
                before = tl.load(place, held, other=0.0).to(tl.float32)
                tl.store(place, (before + product).to(output_ptr.dtype.element_ty), held)
            begin = end
