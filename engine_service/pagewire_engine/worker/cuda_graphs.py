"""Steps as CUDA graphs: one launch instead of hundreds.

A graph is of a fixed number of rows, so that there is one for each of some sizes; a step takes the
smallest that holds it, and the rest of its rows is padding. Sampling parameters, block tables,
positions and lengths are read from the device's state: one graph serves all requests.

A decode step is one graph as a whole. Of any other the layers are one, unless their arithmetic
takes the device longer than launching them takes the host.
"""

from __future__ import annotations

import bisect
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


# Decodes up to this context have graphs of their own, in which keys are not split for longer ones.
_SHORT_CONTEXT = 8192
# Rows times weights from which on launching a step's layers takes the host no longer than they
# take the device, were they of a shape that cuBLAS is asked for the first time: 25 ms of an H100.
_WORTH_A_GRAPH = 9e12
_MOST_GRAPH_TOKENS = 2048
_LAYER_SIZES = (16, *range(32, 256, 32), *range(256, 1024, 64), *range(1024, 2049, 128))
# Sequences of a step that are not decodes, if its layers are to be a graph.
MOST_CHUNKS = 32


class Recorder(Protocol):
    """Records launches, to replay them."""

    def record(self, num_rows: int, run: Callable[[], torch.Tensor]) -> StepGraph:
        """Records what `run` launches for so many rows. Its result is a tensor that each replay
        fills anew."""
        ...


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The recorded launches of a step, or of its layers.

    Attributes:
        num_rows: of the step, padding included.
        launch: launches them all.
        output: [R, N], where a replay leaves logits or hidden states; valid until the next replay
            of any graph.
    """

    num_rows: int
    launch: Callable[[], object]
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        """Launches it. Returns its output."""
        self.launch()
        return self.output


class StepGraphs:
    """Graphs of one kind of step, by number of rows.

    Args:
        sizes: numbers of rows, rising; none: no step is a graph.
        max_context: steps with a longer context are none either.
        recorder: records them.
    """

    def __init__(
        self, sizes: Sequence[int] = (), max_context: int = 0, recorder: Recorder | None = None
    ) -> None:
        self.sizes = list(sizes)
        self.max_context = max_context
        self._recorder = recorder
        self._graphs: dict[int, StepGraph] = {}

    def capture(self, run: Callable[[int], torch.Tensor]) -> None:
        """Records a step of each size, the largest first: the smaller ones use its memory again.

        Args:
            run: runs a step of so many rows, all of them padding.
        """
        if self._recorder is None:
            return
        for size in reversed(self.sizes):
            self._graphs[size] = self._recorder.record(size, functools.partial(run, size))

    def find(self, num_rows: int, longest: int) -> StepGraph | None:
        """The graph for a step of so many rows up to that context, if there is one."""
        index = bisect.bisect_left(self.sizes, num_rows)
        if index == len(self.sizes) or longest > self.max_context:
            return None
        return self._graphs[self.sizes[index]]


@dataclass(frozen=True)
class GraphSet:
    """All graphs of a runner.

    Attributes:
        decodes: whole decode steps by number of sequences, those of shorter contexts first.
        layers: the layers of steps of any kind, by number of tokens.
    """

    decodes: tuple[StepGraphs, ...] = ()
    layers: StepGraphs = field(default_factory=StepGraphs)

    def find_decode(self, num_rows: int, longest: int) -> StepGraph | None:
        """The graph for a decode step, if there is one."""
        found = (graphs.find(num_rows, longest) for graphs in self.decodes)
        return next((graph for graph in found if graph is not None), None)


@dataclass(frozen=True)
class GraphSizes:
    """Which graphs a runner is to have.

    Attributes:
        decodes: sequences of a decode step, rising.
        layers: tokens of a step of any kind, rising.
        max_contexts: longest contexts of decode steps, rising.
    """

    decodes: Sequence[int] = ()
    layers: Sequence[int] = ()
    max_contexts: Sequence[int] = ()

    @classmethod
    def of(
        cls, *, max_num_seqs: int, max_num_tokens: int, max_context: int, num_weights: int
    ) -> GraphSizes:
        """For a model and its limits.

        Args:
            max_num_seqs: most sequences of a step.
            max_num_tokens: most tokens of a step.
            max_context: longest context that is to have graphs.
            num_weights: of the model; 0: no layers are captured.
        """
        contexts = [max_context]
        if max_context > _SHORT_CONTEXT:
            contexts.insert(0, _SHORT_CONTEXT)
        most_tokens = min(max_num_tokens, _MOST_GRAPH_TOKENS)
        if num_weights * most_tokens > _WORTH_A_GRAPH:
            most_tokens = int(_WORTH_A_GRAPH / num_weights)
        layers = [size for size in _LAYER_SIZES if num_weights and size <= most_tokens]
        return cls(decode_sizes(max_num_seqs), layers, contexts)

    @property
    def kinds(self) -> list[Sequence[int]]:
        """The sizes of each kind of graph, in the order in which they are captured."""
        return [self.layers, *(self.decodes for _ in self.max_contexts)]

    @property
    def count(self) -> int:
        """How many graphs they are."""
        return sum(map(len, self.kinds))

    def graphs(self, recorder: Recorder, most: int | None = None) -> GraphSet:
        """Graphs of these sizes, to be captured; `most`: of the largest so many of each kind."""
        if not self.max_contexts:
            return GraphSet()
        first = 0 if most is None else -most
        return GraphSet(
            tuple(
                StepGraphs(self.decodes[first:], context, recorder) for context in self.max_contexts
            ),
            StepGraphs(self.layers[first:], self.max_contexts[0], recorder),
        )


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

    def record(self, num_rows: int, run: Callable[[], torch.Tensor]) -> StepGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Compiles what is not compiled yet, which can't be done while recording.
            run()
            torch.cuda.synchronize(self._device)
            free = torch.cuda.mem_get_info(self._device)[0]
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                # Of a recording that has failed the end fails too, and says less.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self.taken.append(max(free - torch.cuda.mem_get_info(self._device)[0], 0))
        return StepGraph(num_rows, graph.replay, _borrowed(output))


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


def decode_sizes(max_num_seqs: int) -> list[int]:
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
