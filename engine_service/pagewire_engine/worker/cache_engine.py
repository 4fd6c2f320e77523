"""Owns the memory of the KV blocks, on the device and, for swapped requests, in host memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from pagewire_engine.models.base import KVShape
from pagewire_engine.worker.staging import to_device
from pagewire_kernels import huge_pages

# Blocks pass to and from host memory through a buffer of at most so many bytes: when blocks have to
# be swapped out, no memory is left on the device for a copy of all of them.
_STAGING_BYTES = 32 << 20
_HOST_PIECE_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class CacheEngine:
    """One tensor for all layers, so that copying a block is one indexed assignment.

    On CPU the pools' pages cost memory only once blocks have been written, since nothing here
    touches them before. What a block held before is never read: attention stops at the context.

    Attributes:
        num_blocks: blocks in the pool.
        num_cpu_blocks: blocks in host memory.
        block_size: tokens a block holds.
        key_caches: one [num_blocks, block_size, num_kv_heads, head_dim] a layer.
        value_caches: the same.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_cpu_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_cpu_blocks = num_cpu_blocks
        self._device = device
        # Blocks of fp8 are copied as bytes: torch copies no fp8 by index.
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        sizes = (
            shape.num_layers,
            2,
            num_blocks,
            block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        if device.type == "cpu":
            self._pool = huge_pages.empty(sizes, stored)
        else:
            self._pool = torch.empty(sizes, dtype=stored, device=device)
        self.key_caches = [layer[0].view(dtype) for layer in self._pool.unbind(0)]
        self.value_caches = [layer[1].view(dtype) for layer in self._pool.unbind(0)]
        self._swap = _SwapSpace(self._pool, num_cpu_blocks)

    def clear(self) -> None:
        """Makes every block's keys and values 0."""
        self._pool.zero_()

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, CPU block) to host memory, in every layer.

        What is written to the device blocks after this call does not reach the copies.
        """
        if pairs:
            self._swap.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (CPU block, device block) back from host memory, in every layer."""
        if pairs:
            self._swap.swap_in(pairs)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks in every layer.

        No destination is a source of the same call.
        """
        if not pairs:
            return
        sources, destinations = zip(*pairs, strict=True)
        copied = self._pool[:, :, to_device(sources, self._device)]
        self._pool[:, :, to_device(destinations, self._device)] = copied


class _SwapSpace:
    """Host memory for blocks, and the copies to and from it.

    A block is scattered over the device's pool, one piece a layer, but contiguous in host memory:
    indexed copies on the device collect blocks in a staging buffer (or spread them from it), and
    each run of neighbours in host memory is then one transfer. On CUDA the transfers are made by a
    stream of their own. It and the stream that computes wait for each other where one needs what
    the other made; the host waits for neither.
    """

    def __init__(self, pool: torch.Tensor, num_blocks: int) -> None:
        self._device = pool.device
        on_cuda = pool.device.type == "cuda"
        # [blocks, layers, 2, block_size, num_kv_heads, head_dim], a view
        self._blocks = pool.movedim(2, 0)
        block_shape = self._blocks.shape[1:]
        self._host = _HostBlocks(num_blocks, block_shape, pool.dtype, pinned=on_cuda)
        block_bytes = block_shape.numel() * pool.dtype.itemsize
        self._chunk = min(staging_bytes(block_bytes) // block_bytes, num_blocks)
        self._staging = torch.empty(
            (self._chunk, *block_shape), dtype=pool.dtype, device=pool.device
        )
        self._stream: torch.cuda.Stream | None = None
        if on_cuda:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]  # torch's

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for chunk in self._chunks(pairs):
            sources = to_device([device_block for device_block, _ in chunk], self._device)
            # The pool's last write and the staging buffer's last transfer come before this.
            self._after_transfers()
            staged = self._staging[: len(chunk)]
            torch.index_select(self._blocks, 0, sources, out=staged)
            with self._transfers():
                for first, held in self._host.runs([cpu_block for _, cpu_block in chunk]):
                    held.copy_(staged[first : first + len(held)], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for chunk in self._chunks(pairs):
            destinations = to_device([device_block for _, device_block in chunk], self._device)
            staged = self._staging[: len(chunk)]
            with self._transfers():
                for first, held in self._host.runs([cpu_block for cpu_block, _ in chunk]):
                    staged[first : first + len(held)].copy_(held, non_blocking=True)
            self._after_transfers()
            self._blocks.index_copy_(0, destinations, staged)

    def _chunks(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        for start in range(0, len(pairs), self._chunk):
            yield pairs[start : start + self._chunk]

    @contextlib.contextmanager
    def _transfers(self) -> Iterator[None]:
        """What is copied in here is copied after the computation so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _after_transfers(self) -> None:
        """What is computed from here on is computed after the transfers so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _HostBlocks:
    """Blocks in host memory. On CUDA it is locked, which takes a second for some gigabytes: it is
    allocated a piece at a time, when a block of the piece is first used."""

    def __init__(
        self, num_blocks: int, block_shape: torch.Size, dtype: torch.dtype, *, pinned: bool
    ) -> None:
        self._block_shape = block_shape
        self._dtype = dtype
        self._pinned = pinned
        block_bytes = block_shape.numel() * dtype.itemsize
        self._piece = max(_HOST_PIECE_BYTES // block_bytes, 1)
        self._num_blocks = num_blocks
        self._pieces: dict[int, torch.Tensor] = {}

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The memory of these blocks, [count, *block_shape] for each run of neighbours in a piece,
        with the index in `blocks` of the run's first."""
        for first, block, count in _runs(blocks):
            last = block + count
            while block < last:
                number, offset = divmod(block, self._piece)
                held = self._allocated(number)[offset : offset + last - block]
                yield first, held
                first, block = first + len(held), block + len(held)

    def _allocated(self, number: int) -> torch.Tensor:
        if number not in self._pieces:
            count = min(self._piece, self._num_blocks - number * self._piece)
            self._pieces[number] = self._new((count, *self._block_shape))
        return self._pieces[number]

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype, pin_memory=self._pinned)
        except RuntimeError as error:
            if not self._pinned:
                raise
            logger.warning("no more host memory can be locked, swapping is slower: %s", error)
            return torch.empty(shape, dtype=self._dtype)


def bytes_per_block(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block over all layers."""
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return per_token * block_size * dtype.itemsize


def staging_bytes(block_bytes: int) -> int:
    """The most that a CacheEngine takes on the device besides its pool."""
    return max(_STAGING_BYTES // block_bytes, 1) * block_bytes


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours that follow one another in `blocks`: (index of the first, first block, count)."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield first, blocks[first], index - first
            first = index
