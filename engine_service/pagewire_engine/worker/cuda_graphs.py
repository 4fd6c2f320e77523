"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph is of a fixed number of rows, so that there is one for each of some batch sizes; a step
takes the smallest that holds it, and fills it up with rows of padding. Sampling parameters, block
tables and positions are read from the device's state: one graph serves all requests.
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records launches, to replay them."""

    def record(self, run: Callable[[], torch.Tensor]) -> DecodeGraph:
        """Records what `run` launches. Its result is a tensor that each replay fills anew."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The recorded launches of a decode step.

    Attributes:
        launch: launches them all.
        logits: [num_rows, V], where a replay leaves them; valid until the next replay.
    """

    launch: Callable[[], object]
    logits: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Sequences, padding included."""
        return len(self.logits)

    def replay(self) -> torch.Tensor:
        """Launches the step. Returns its logits."""
        self.launch()
        return self.logits


class DecodeGraphs:
    """Graphs of decode steps, by batch size.

    Args:
        sizes: batch sizes, rising; none: no step is a graph.
        max_context: steps with a longer context are none either.
        recorder: records them.
    """

    def __init__(
        self, sizes: Sequence[int] = (), max_context: int = 0, recorder: Recorder | None = None
    ) -> None:
        self.sizes = list(sizes)
        self._max_context = max_context
        self._recorder = recorder
        self._graphs: dict[int, DecodeGraph] = {}

    def capture(self, decode: Callable[[int], torch.Tensor]) -> None:
        """Records a step of each size, the largest first: the smaller ones use its memory again.

        Args:
            decode: runs a step of so many rows, all of them padding.
        """
        if self._recorder is None:
            return
        for size in reversed(self.sizes):
            self._graphs[size] = self._recorder.record(lambda size=size: decode(size))  # type: ignore[misc]

    def find(self, num_rows: int, contexts: Sequence[int]) -> DecodeGraph | None:
        """The graph for a step of so many sequences with these contexts, if there is one."""
        index = bisect.bisect_left(self.sizes, num_rows)
        if index == len(self.sizes) or max(contexts) > self._max_context:
            return None
        return self._graphs[self.sizes[index]]


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory.

    Attributes:
        taken: bytes of the device that each recording took.
    """

    def __init__(self, device: torch.device) -> None:
        self.taken: list[int] = []
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> DecodeGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Compiles what is not compiled yet, which can't be done while recording.
            run()
            torch.cuda.synchronize(self._device)
            free = torch.cuda.mem_get_info(self._device)[0]
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                logits = run()
            finally:
                graph.capture_end()
        self.taken.append(max(free - torch.cuda.mem_get_info(self._device)[0], 0))
        return DecodeGraph(graph.replay, _borrowed(logits))


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the same memory, which remains its pool's: the next recording uses it
    again."""
    interface = {
        "shape": tuple(tensor.shape),
        "typestr": f"<i{tensor.element_size()}",
        "data": (tensor.data_ptr(), False),
        "strides": None,
        "version": 3,
    }
    words = SimpleNamespace(__cuda_array_interface__=interface)
    return torch.as_tensor(words, device=tensor.device).view(tensor.dtype)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: close together where the batch is small, so that padding costs
    little, and few, so that all are captured within seconds."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16)]
    size = 256
    while size < max_num_seqs:
        sizes.append(size)
        size += 1 << (size.bit_length() - 4)  # eight for each doubling
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@contextmanager
def timed_capture(count: int) -> Iterator[None]:
    """Around the capture of so many graphs: keeps the garbage collector out of it, which might free
    memory of the device in between, and says how long it took."""
    begun = time.monotonic()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        torch.cuda.empty_cache()
    logger.info("captured %d CUDA graphs in %.1f s", count, time.monotonic() - begun)
