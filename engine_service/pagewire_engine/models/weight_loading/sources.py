"""What the loader asks of a file format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class TensorSource(Protocol):
    """The tensors of a checkpoint, by Hugging Face name.

    Attributes:
        reads_in_parallel: whether several threads may read at a time.
    """

    reads_in_parallel: bool

    def names(self) -> Iterable[str]:
        """All of them, in the order of the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its dimensions, slowest first."""
        ...

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Copies its values to `place`, which has its shape, converting the dtype.

        Raises:
            ModelFileError: the file can't be read.
        """
        ...

    def where(self, name: str) -> str:
        """The file it is in, for messages."""
        ...

    def close(self) -> None:
        """Lets go of the files."""
        ...
