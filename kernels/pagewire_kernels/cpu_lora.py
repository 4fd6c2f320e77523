"""LoRA in C++ on CPU. Pairs may be fp32, bfloat16 or float16; activations and sums are fp32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pagewire_kernels.cpu import DTYPES
from pagewire_kernels.lora import (
    LoraBackend,
    LoraPair,
    LoraRows,
    LoraShape,
    LoraTable,
    PackedLora,
)

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Slot(ctypes.Structure):
    _fields_ = [
        ("down", _POINTER),
        ("up", _POINTER),
        ("ranks", _POINTER),
        ("scales", _POINTER),
        ("dtype", _INT),
    ]


class LoraLinearPointers(ctypes.Structure):
    """As csrc/lora.h has it."""

    _fields_ = [
        ("slots", _POINTER),
        ("sizes", _POINTER),
        ("num_parts", _INT),
        ("inputs", _INT),
    ]


class CpuPacked(PackedLora):
    """Pairs of one linear, parts that have none left out.

    Attributes:
        down: [sum of ranks, inputs]; of an embedding [num_embeddings, sum of ranks].
        up: flat; part after part [rank, outputs], so that outputs lie side by side.
        ranks: int64 [parts].
        scales: fp32 [parts].
    """

    def __init__(
        self, shape: LoraShape, pairs: Sequence[LoraPair | None], *, embedding: bool
    ) -> None:
        there = [pair for pair in pairs if pair is not None]
        dtypes = {tensor.dtype for pair in there for tensor in (pair.down, pair.up)}
        # What has no kernel of its own, or comes mixed, is widened: that changes no number.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        dtype = dtype if dtype in _DTYPES else torch.float32
        down = torch.cat([pair.down.to(dtype) for pair in there])
        self.down = (down.t() if embedding else down).contiguous()
        self.up = torch.cat([pair.up.to(dtype).t().flatten() for pair in there])
        self.ranks = torch.tensor([0 if pair is None else pair.rank for pair in pairs])
        self.scales = torch.tensor(
            [0.0 if pair is None else pair.scale for pair in pairs], dtype=torch.float32
        )
        self._shape = shape
        self._embedding = embedding

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def pairs(self) -> list[LoraPair | None]:
        down = self.down.t() if self._embedding else self.down
        found: list[LoraPair | None] = []
        rank_start = up_start = 0
        ranks, scales = self.ranks.tolist(), self.scales.tolist()
        for size, rank, scale in zip(self._shape.parts, ranks, scales, strict=True):
            end = up_start + rank * size
            up = self.up[up_start:end].view(rank, size).t()
            pair = LoraPair(down[rank_start : rank_start + rank], up, scale)
            found.append(pair if rank else None)
            rank_start, up_start = rank_start + rank, end
        return found


class CpuLora(LoraBackend):
    """The C++ kernels' tables: pointers to what was packed, so that a slot takes no memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def pack(
        self,
        shape: LoraShape,
        pairs: Sequence[LoraPair | None],
        dtype: torch.dtype,
        *,
        embedding: bool = False,
    ) -> CpuPacked:
        return CpuPacked(shape, pairs, embedding=embedding)

    def table(
        self,
        shape: LoraShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embedding: bool = False,
    ) -> CpuTable:
        return CpuTable(self._library, shape, num_slots)


class CpuTable(LoraTable):
    """The adapters of one linear, by slot.

    Attributes:
        pointers: what the C++ side reads; its address does not change.
    """

    def __init__(self, library: ctypes.CDLL, shape: LoraShape, num_slots: int) -> None:
        self._library = library
        self._shape = shape
        self._slots = (_Slot * num_slots)()
        self._sizes = (_INT * len(shape.parts))(*shape.parts)
        # A pointer alone keeps no tensor alive.
        self._kept: list[CpuPacked | None] = [None] * num_slots
        self.pointers = LoraLinearPointers(
            ctypes.addressof(self._slots),
            ctypes.addressof(self._sizes),
            len(shape.parts),
            shape.inputs,
        )

    def put(self, slot: int, packed: PackedLora | None) -> None:
        if packed is None:
            self._slots[slot] = _Slot()
        else:
            assert isinstance(packed, CpuPacked)
            self._slots[slot] = _Slot(
                packed.down.data_ptr(),
                packed.up.data_ptr(),
                packed.ranks.data_ptr(),
                packed.scales.data_ptr(),
                DTYPES[packed.down.dtype],
            )
        self._kept[slot] = packed

    def add(self, hidden: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        self._check(hidden, self._shape.inputs)
        self._check(output, self._shape.outputs)
        slots = check_slots(rows, len(output))
        self._library.pagewire_lora_add(
            ctypes.byref(self.pointers),
            slots.data_ptr(),
            hidden.data_ptr(),
            output.data_ptr(),
            len(output),
            hidden.stride(0),
            output.stride(0),
            torch.get_num_threads(),
        )

    def add_embedded(self, ids: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        """See LoraTable.

        Raises:
            IndexError: there is no such row.
        """
        self._check(output, self._shape.outputs)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._shape.inputs:
            raise IndexError(f"ids must lie in 0 to {self._shape.inputs - 1}")
        slots, ids = check_slots(rows, len(output)), ids.contiguous()
        self._library.pagewire_lora_add_embedded(
            ctypes.byref(self.pointers),
            slots.data_ptr(),
            ids.data_ptr(),
            output.data_ptr(),
            len(output),
            output.stride(0),
            torch.get_num_threads(),
        )

    def _check(self, rows: torch.Tensor, columns: int) -> None:
        """The C++ side trusts its pointers."""
        if rows.dtype != torch.float32 or rows.stride(-1) != 1 or rows.shape[-1] != columns:
            raise ValueError(
                f"the cpu lora kernels read float32 rows of {columns} columns, not {rows.dtype} "
                f"{list(rows.shape)} with strides {rows.stride()}"
            )


def check_slots(rows: LoraRows, count: int) -> torch.Tensor:
    """The slots as the C++ side reads them.

    Raises:
        ValueError: they are not one a row.
    """
    slots = rows.slots
    if slots.dtype != torch.int32 or slots.shape != (count,) or not slots.is_contiguous():
        raise ValueError(
            f"slots are contiguous int32 [{count}], not {slots.dtype} {list(slots.shape)}"
        )
    return slots
