"""Host memory that weights pass through on their way from a file to a parameter."""

from __future__ import annotations

import torch

# Two a thread: one is filled from the file while the other is copied to the device.
_BUFFERS = 2
BUFFER_BYTES = 8 << 20


class Staging:
    """Buffers of one thread; on CUDA pinned, with a stream of their own to copy on."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=on_cuda)
            for _ in range(_BUFFERS)
        ]
        self._stream: torch.cuda.Stream | None = None
        self._copies: list[torch.cuda.Event] = []
        self._turn = 0
        if on_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
            self._copies = [torch.cuda.Event() for _ in range(_BUFFERS)]  # type: ignore[no-untyped-call]

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for so many elements, as soon as the copy made from it before has ended."""
        self._turn = (self._turn + 1) % _BUFFERS
        if self._copies:
            self._copies[self._turn].synchronize()
        return self._buffers[self._turn][: count * dtype.itemsize].view(dtype)

    def copy(self, buffer: torch.Tensor, place: torch.Tensor) -> None:
        """Copies what `buffer()` gave last, filled, to a flat place; on CUDA without waiting."""
        if self._stream is None:
            place.copy_(buffer)
            return
        with torch.cuda.stream(self._stream):
            if buffer.dtype != place.dtype:
                # Converted on the device: this thread has files to read.
                buffer = buffer.to(self._device, non_blocking=True)
            place.copy_(buffer, non_blocking=True)
            self._copies[self._turn].record()

    def finish(self) -> None:
        """Waits until every copy has ended."""
        if self._stream is not None:
            self._stream.synchronize()
