"""A worker's adapters: their weights in host memory, and the slots of those that steps use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import ActiveAdapters, LayerAdapters
from pagewire_engine.worker.adapter_loading import (
    AdapterTargets,
    adapted_layers,
    load_weights,
)
from pagewire_kernels.dense import DenseBackend
from pagewire_kernels.lora import NO_ADAPTER, LoraRows, LoraTable, PackedLora


class WorkerAdapters:
    """Loads adapters for one model, and lets its layers use them.

    Steps are one thread's; `load`, `drop` and `memory` may be called from any.

    Args:
        model: with its weights; its layers get tables of adapters.
        dense: the kernels it computes with.
        architecture: its name, for messages.
        max_loras: adapters of one step.
        max_rank: the highest rank of one.
        dtype: the model's.
        device: where it is.

    Attributes:
        step_lock: held by whoever runs a step, since what a step reads must not go meanwhile.
    """

    def __init__(
        self,
        model: CausalLM,
        dense: DenseBackend,
        architecture: str,
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._targets = AdapterTargets(model, device)
        self._architecture = architecture
        self._max_loras = max_loras
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._active = ActiveAdapters()
        self._host: dict[int, dict[str, PackedLora]] = {}
        # Numbers and their slots, the least recently used first.
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._num_host_loads = 0
        self._num_device_loads = 0
        self.step_lock = threading.RLock()
        self._use(dense)

    @property
    def active(self) -> ActiveAdapters:
        """Which adapter each row of the present step has."""
        return self._active

    def load(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        """Reads an adapter into host memory.

        Args:
            number: what steps will call it; a new one.
            folder: its files.

        Raises:
            PagewireError: it can't be served; the error says why.
        """
        loaded = load_weights(folder, self._targets, self._max_rank, self._architecture)
        while True:
            lora = self._lora
            packed = {
                path: lora.pack(layer.shape, layer.pairs, self._dtype, embedding=layer.embedding)
                for path, layer in loaded.layers.items()
            }
            with self.step_lock:
                if lora is not self._lora:
                    continue  # the kernels have changed meanwhile
                self._host[number] = packed
                self._num_host_loads += 1
                return loaded.description

    def drop(self, number: int) -> None:
        """Lets go of an adapter that no request uses. One that is not there is no error."""
        with self.step_lock:
            slot = self._slots.pop(number, None)
            if slot is not None:
                self._fill(slot, {})
            self._host.pop(number, None)

    def memory(self) -> AdapterMemory:
        """Where adapters are."""
        slot_bytes = self._slot_bytes
        return AdapterMemory(
            host=list(self._host),
            device=dict.fromkeys(list(self._slots), slot_bytes),
            num_host_loads=self._num_host_loads,
            num_device_loads=self._num_device_loads,
        )

    def place(self, numbers: Sequence[int]) -> list[int]:
        """The slot of each of a step's adapters, filled; NO_ADAPTER for 0.

        Args:
            numbers: at most `max_loras` different ones besides 0, all in host memory.
        """
        wanted = dict.fromkeys(number for number in numbers if number)
        for number in wanted:
            if number in self._slots:
                self._slots.move_to_end(number)
        for number in wanted:
            if number not in self._slots:
                self._give_slot(number, wanted)
        slots = {0: NO_ADAPTER} | {number: self._slots[number] for number in wanted}
        return [slots[number] for number in numbers]

    def begin(self, numbers: Sequence[int], lengths: Sequence[int]) -> LoraRows | None:
        """Lets the layers use a step's adapters from now on.

        Args:
            numbers: the adapter of each part of the step; 0: none.
            lengths: tokens of each.

        Returns:
            The slots of the step's rows; None where no row has an adapter.
        """
        self._active.rows = None
        if any(numbers):
            slots = np.repeat(np.array(self.place(numbers), np.int32), lengths)
            self._active.rows = LoraRows(torch.from_numpy(slots).to(self._device))
        return self._active.rows

    def use_kernels(self, dense: DenseBackend) -> None:
        """Changes to other kernels between steps, after the model has."""
        with self.step_lock:
            before, pairs = self._host, {}
            for number, packed in before.items():
                pairs[number] = {path: each.pairs() for path, each in packed.items()}
            self._slots.clear()
            self._use(dense)
            shapes = dict(adapted_layers(self._model))
            self._host = {
                number: {
                    path: self._lora.pack(
                        shapes[path].lora_shape(),
                        each,
                        self._dtype,
                        embedding=shapes[path].is_embedding,
                    )
                    for path, each in layers.items()
                }
                for number, layers in pairs.items()
            }

    def _use(self, dense: DenseBackend) -> None:
        self._lora = dense.lora()
        dtype = dense.activations(self._dtype)
        self._tables: dict[str, LoraTable] = {}
        for path, layer in adapted_layers(self._model):
            table = self._tables[path] = self._lora.table(
                layer.lora_shape(),
                self._max_loras,
                self._max_rank,
                dtype,
                self._device,
                embedding=layer.is_embedding,
            )
            layer.adapters = LayerAdapters(table, self._active)
        self._slot_bytes = sum(table.slot_bytes for table in self._tables.values())

    def _give_slot(self, number: int, wanted: dict[int, None]) -> None:
        packed = self._host.get(number)
        if packed is None:
            raise RuntimeError(f"adapter {number} is not in host memory")
        if len(self._slots) == self._max_loras:
            idle = next((each for each in self._slots if each not in wanted), None)
            if idle is None:
                raise RuntimeError(f"a step has more than {self._max_loras} adapters")
            slot = self._slots.pop(idle)
        else:
            slot = min(set(range(self._max_loras)) - set(self._slots.values()))
        self._slots[number] = slot
        self._fill(slot, packed)
        self._num_device_loads += 1

    def _fill(self, slot: int, packed: dict[str, PackedLora]) -> None:
        for path, table in self._tables.items():
            table.put(slot, packed.get(path))
