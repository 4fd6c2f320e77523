"""Weights from a transformers model in memory, for engines whose checkpoint would be gigabytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class StateSource:
    """Implements TensorSource with a state dict."""

    reads_in_parallel = False

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def names(self) -> Iterable[str]:
        return self._state

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def where(self, name: str) -> str:
        return "a model in memory"

    def read_into(self, name: str, place: torch.Tensor) -> None:
        place.copy_(self._state[name])

    def close(self) -> None:
        """There is nothing to let go of."""
