"""The adapter of each row of a step, on the device, at an address that graphs know."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.device_batch import KnownSequence
from pagewire_engine.worker.staging import StepArray, Uploads
from pagewire_kernels.lora import NO_ADAPTER, LoraRows


class DeviceAdapters:
    """Tells the device which slots a step's rows use, where that has changed.

    Args:
        adapters: have the slots.
        most_rows: of a step.
        device: where they are.
    """

    def __init__(self, adapters: WorkerAdapters, most_rows: int, device: torch.device) -> None:
        self._adapters = adapters
        self._slots = torch.full((most_rows,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._told: list[int] = [NO_ADAPTER] * most_rows

    def clear(self) -> None:
        """No row has an adapter."""
        self._slots.fill_(NO_ADAPTER)
        self._told = [NO_ADAPTER] * len(self._told)

    def tell(
        self,
        sequences: Sequence[KnownSequence],
        lengths: Sequence[int],
        num_rows: int,
        uploads: Uploads,
    ) -> None:
        """Fills the slots of a step's adapters, and says which rows use them.

        Args:
            sequences: of the step's parts.
            lengths: rows of each.
            num_rows: rows of the step, padding at the end included.
            uploads: for what the device must be told.
        """
        placed = self._adapters.place([sequence.new.adapter for sequence in sequences])
        slots: list[int] = []
        for slot, length in zip(placed, lengths, strict=True):
            slots += [slot] * length
        slots += [NO_ADAPTER] * (num_rows - len(slots))
        if slots == self._told[:num_rows]:
            return
        array = StepArray()
        array.add(slots)
        self._slots[:num_rows].copy_(uploads.send(array)[:num_rows])
        self._told[:num_rows] = slots

    def use(self, num_rows: int) -> LoraRows:
        """Lets the layers use the first rows' adapters in what is launched next. Returns them."""
        rows = self._adapters.active.rows = LoraRows(self._slots[:num_rows])
        return rows
