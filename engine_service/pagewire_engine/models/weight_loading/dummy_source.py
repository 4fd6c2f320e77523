"""Seeded random weights, for benchmarks: the same for the same seed, whatever the order."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

# Keeps activations and logits finite through any number of layers.
_LIMIT = 0.02


class DummySource:
    """Tensors of the shapes a model asks for, made on the device they are for: a device of another
    type makes other numbers of the same seed."""

    reads_in_parallel = False

    def __init__(self, places: dict[str, torch.Tensor], seed: int) -> None:
        self._shapes = {name: tuple(place.shape) for name, place in places.items()}
        self._seed = seed

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def where(self, name: str) -> str:
        return "dummy weights"

    def read_into(self, name: str, place: torch.Tensor) -> None:
        generator = torch.Generator(place.device)
        generator.manual_seed(self._seed * 1_000_003 + zlib.crc32(name.encode()))
        if place.dim() == 1 and name.endswith("weight"):
            place.fill_(1.0)  # norms
        else:
            place.uniform_(-_LIMIT, _LIMIT, generator=generator)

    def close(self) -> None:
        """There is nothing to let go of."""
