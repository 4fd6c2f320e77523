"""Small arrays on their way to a device and back, without a wait on either side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# Steps whose arrays may be on their way at a time; one more waits for the first.
_RING = 4
_FIRST_SIZE = 1 << 14
_FIRST_DOWNLOAD = 1 << 10
# Parts of a step's array begin at multiples of so many numbers: kernels read them as tensors, and
# those of other alignments would be compiled for each.
_ALIGNMENT = 32


class StepArray:
    """Gathers the parts of a step's int32 array."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Sequence[int]]] = []
        self.size = 0

    def add(self, numbers: Sequence[int]) -> int:
        """Adds a part. Returns where it begins."""
        at = self.size
        if numbers:
            self._parts.append((at, numbers))
            self.size += -(-len(numbers) // _ALIGNMENT) * _ALIGNMENT
        return at

    def write(self, array: npt.NDArray[np.int32]) -> None:
        """Puts all parts where they belong."""
        for at, numbers in self._parts:
            array[at : at + len(numbers)] = numbers


class Uploads:
    """Sends a step's array to the device: one copy from locked memory, which is not written again
    before that copy was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._ring = [_Upload(self._on_cuda) for _ in range(_RING)]
        self._next = 0

    def send(self, array: StepArray) -> torch.Tensor:
        """int32 [size or more] on the device, for kernels that are queued after this."""
        upload = self._ring[self._next]
        self._next = (self._next + 1) % _RING
        upload.wait()
        upload.reserve(array.size)
        array.write(upload.array)
        part = upload.tensor[: array.size]
        if not self._on_cuda:
            return part.clone()
        sent = part.to(self._device, non_blocking=True)
        upload.note_sent()
        return sent


class _Upload:
    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._sent = _event() if pinned else None
        self._reserve(_FIRST_SIZE)

    def reserve(self, size: int) -> None:
        if size > len(self.array):
            self._reserve(2 * size)

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def note_sent(self) -> None:
        assert self._sent is not None
        self._sent.record()

    def _reserve(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()


class Downloads:
    """Brings small tensors to the host, in locked buffers that are used again."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._free: list[Download] = []

    def begin(self, tensor: torch.Tensor) -> Download:
        """Copies int32 [N] once all that is queued so far has been computed."""
        download = self._free.pop() if self._free else Download(self._free, self._on_cuda)
        download.begin(tensor)
        return download


class Download:
    """One such copy under way."""

    def __init__(self, free: list[Download], pinned: bool) -> None:
        self._free = free
        self._pinned = pinned
        self._landed = _event() if pinned else None
        self._count = 0
        self._reserve(_FIRST_DOWNLOAD)

    def begin(self, tensor: torch.Tensor) -> None:
        """See Downloads.begin."""
        self._count = len(tensor)
        if self._count > len(self._buffer):
            self._reserve(2 * self._count)
        self._buffer[: self._count].copy_(tensor, non_blocking=True)
        if self._landed is not None:
            self._landed.record()

    def take(self) -> npt.NDArray[np.int32]:
        """Waits for the numbers, and gives the buffer back. To be called once."""
        if self._landed is not None:
            self._landed.synchronize()
        numbers = self._array[: self._count].copy()
        self._free.append(self)
        return numbers

    def _reserve(self, size: int) -> None:
        self._buffer = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        self._array: npt.NDArray[np.int32] = self._buffer.numpy()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's


def to_device(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """[len(numbers)]; on CUDA without a wait for what was queued there."""
    return sent(torch.tensor(numbers, dtype=dtype), device)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on the device, without a wait for what was queued there: its copy in
    locked memory is kept by torch until it has arrived."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
