"""LoRA (arXiv:2106.09685) for batches whose rows use different adapters, or none.

A linear has a table of adapters, one a slot. Each row of a step names a slot, and its output gets
`scale * up (down x)` of that slot's pair: "shrink" to the rank, then "expand". Punica (Chen et al.,
MLSys 2024) and S-LoRA (Sheng et al., MLSys 2024) showed that one batch can serve many so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

# The slot of rows without an adapter.
NO_ADAPTER = -1


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to one linear, or to one part of a packed one.

    Attributes:
        down: [rank, inputs], PEFT's lora_A. Of an embedding [rank, num_embeddings].
        up: [outputs, rank], lora_B.
        scale: factor on their product.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True)
class LoraShape:
    """A linear's sizes.

    Attributes:
        inputs: columns of its weight; of an embedding its rows.
        parts: outputs of each part, one where it is not packed.
    """

    inputs: int
    parts: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return sum(self.parts)


class LoraRows:
    """Which slot each row of a step uses.

    Args:
        slots: int32 [T], NO_ADAPTER for none; on the device of the tensors it goes with.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def take(self, rows: list[int] | slice | torch.Tensor) -> LoraRows:
        """Of some of the rows, in that order."""
        return LoraRows(self.slots[rows])

    @cached_property
    def by_slot(self) -> list[tuple[int, torch.Tensor]]:
        """Each slot in use, and its rows: int64 [N]. Read on the host."""
        used = sorted(set(self.slots.tolist()) - {NO_ADAPTER})
        return [(slot, (self.slots == slot).nonzero().flatten()) for slot in used]


class PackedLora(ABC):
    """A linear's pairs of one adapter as a backend reads them."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Host memory that it holds."""

    @abstractmethod
    def pairs(self) -> list[LoraPair | None]:
        """What it was made of, one a part."""


class LoraTable(ABC):
    """The adapters of one linear or embedding, by slot.

    Attributes:
        slot_bytes: memory that each slot takes, beside what was packed, from the start.
    """

    slot_bytes: int = 0

    @abstractmethod
    def put(self, slot: int, packed: PackedLora | None) -> None:
        """Fills a slot; None: its adapter leaves this linear as it is."""

    @abstractmethod
    def add(self, hidden: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        """Adds to each row of a linear's output what its slot's adapter does.

        A row's result does not depend on the other rows.

        Args:
            hidden: [T, inputs], the linear's input.
            output: [T, outputs], changed in place.
            rows: T slots.
        """

    @abstractmethod
    def add_embedded(self, ids: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        """The same of an embedding: ids int64 [T], output [T, embedding_dim]."""


class LoraBackend(ABC):
    """Makes tables, and what is put into them."""

    @abstractmethod
    def pack(
        self,
        shape: LoraShape,
        pairs: Sequence[LoraPair | None],
        dtype: torch.dtype,
        *,
        embedding: bool = False,
    ) -> PackedLora:
        """A linear's pairs in host memory, one a part; None where the adapter has none.

        Args:
            shape: the linear's.
            pairs: floating point, on the host.
            dtype: of the activations.
            embedding: for `add_embedded`.
        """

    @abstractmethod
    def table(
        self,
        shape: LoraShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embedding: bool = False,
    ) -> LoraTable:
        """An empty table.

        Args:
            shape: the linear's.
            num_slots: adapters it can hold.
            max_rank: the highest rank of one.
            dtype: of the activations.
            device: where they are.
            embedding: for `add_embedded`.
        """


class TorchPacked(PackedLora):
    """The pairs as they are."""

    def __init__(self, pairs: Sequence[LoraPair | None]) -> None:
        self._pairs = list(pairs)

    @property
    def num_bytes(self) -> int:
        pairs = [pair for pair in self._pairs if pair is not None]
        return sum(tensor.nbytes for pair in pairs for tensor in (pair.down, pair.up))

    def pairs(self) -> list[LoraPair | None]:
        return list(self._pairs)


class TorchLora(LoraBackend):
    """The reference, on any device. Reads slots on the host."""

    def pack(
        self,
        shape: LoraShape,
        pairs: Sequence[LoraPair | None],
        dtype: torch.dtype,
        *,
        embedding: bool = False,
    ) -> TorchPacked:
        return TorchPacked(pairs)

    def table(
        self,
        shape: LoraShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embedding: bool = False,
    ) -> TorchTable:
        return TorchTable(shape, num_slots, dtype, device)


class TorchTable(LoraTable):
    """One adapter after another, by plain products."""

    def __init__(
        self, shape: LoraShape, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._slots: list[list[LoraPair | None]] = [[] for _ in range(num_slots)]
        self._dtype = dtype
        self._device = device

    def put(self, slot: int, packed: PackedLora | None) -> None:
        pairs = [] if packed is None else packed.pairs()
        self._slots[slot] = [None if pair is None else self._here(pair) for pair in pairs]

    def add(self, hidden: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        for slot, members in rows.by_slot:
            for start, pair in self._parts(slot):
                shrunk = F.linear(hidden[members].to(pair.down.dtype), pair.down)
                self._expand(output, members, start, pair, shrunk)

    def add_embedded(self, ids: torch.Tensor, output: torch.Tensor, rows: LoraRows) -> None:
        for slot, members in rows.by_slot:
            for start, pair in self._parts(slot):
                self._expand(output, members, start, pair, F.embedding(ids[members], pair.down.t()))

    def _parts(self, slot: int) -> list[tuple[int, LoraPair]]:
        """Pairs, and the first column of the output of each."""
        found, start = [], 0
        for size, pair in zip(self._shape.parts, self._slots[slot], strict=False):
            if pair is not None:
                found.append((start, pair))
            start += size
        return found

    def _expand(
        self,
        output: torch.Tensor,
        members: torch.Tensor,
        start: int,
        pair: LoraPair,
        shrunk: torch.Tensor,
    ) -> None:
        columns = output[:, start : start + pair.up.shape[0]]
        columns[members] += (F.linear(shrunk, pair.up) * pair.scale).to(output.dtype)

    def _here(self, pair: LoraPair) -> LoraPair:
        down, up = (each.to(self._device, self._dtype) for each in (pair.down, pair.up))
        return LoraPair(down, up, pair.scale)
