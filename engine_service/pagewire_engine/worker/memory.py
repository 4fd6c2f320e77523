"""How much memory there is for KV blocks: of the machine or its container, and of a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil
import torch

from pagewire.errors import InvalidArgumentError
from pagewire_engine.worker.cuda_graphs import CudaRecorder, GraphSet, GraphSizes

_GIB = 1 << 30
# On CPU the pool shares the machine with everything else: a share, and never more than this.
_CPU_SHARE = 0.4
_CPU_LIMIT = 4 * _GIB
# Where swapped blocks leave a GPU they go to memory that is locked; on CPU they go from one place
# in the same memory to another.
_SWAP_LIMITS = {"cuda": 4 * _GIB, "cpu": _GIB}
_SWAP_SHARE = 0.1
# Limit, usage and statistics of a control group's memory; version 2, then version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)


def default_cpu_cache_bytes() -> int:
    """A share of the memory that is free now."""
    return min(int(_CPU_SHARE * available_bytes()), _CPU_LIMIT)


def default_swap_bytes(device_type: str) -> int:
    """4 GiB for a GPU, as in vLLM, and less for a CPU or where little is free."""
    return min(int(_SWAP_SHARE * available_bytes()), _SWAP_LIMITS[device_type])


def available_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Free memory of the machine, or of the container or service where that is less.

    Args:
        root: where control groups are mounted.
        own: the file that names this process's groups.
    """
    available = int(psutil.virtual_memory().available)
    for folder in _cgroup_folders(root, own):
        for limit_file, usage_file, stat_file, cached_name in _CGROUP_FILES:
            try:
                limit = int((folder / limit_file).read_text())
                usage = int((folder / usage_file).read_text())
                statistics = (folder / stat_file).read_text().splitlines()
                # Files that were read, weights above all, count as used until somebody needs the
                # room.
                cached = int(dict(line.split() for line in statistics).get(cached_name, 0))
            except (OSError, ValueError):  # no such group, or its limit is "max"
                continue
            available = min(available, max(limit - (usage - cached), 0))
    return available


def _cgroup_folders(root: Path, own: Path) -> Iterator[Path]:
    """The groups whose limits bind this process: its own, and all above it.

    A container sees its own group as the root, whatever `own` says.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "1:memory:/"]:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "memory" if controllers else root
        group = PurePosixPath(name.lstrip("/"))
        if ".." in group.parts:  # outside of what is mounted here
            continue
        yield from (mount / part for part in (group, *group.parents))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU once the model has run its largest step.

    Attributes:
        total: the card's.
        used: by the weights and, at its peak, the step.
        outside: by other processes and by the CUDA context.
    """

    total: int
    used: int
    outside: int

    def left(self, utilization: float) -> int:
        """What that share of the card leaves for KV blocks.

        Raises:
            InvalidArgumentError: nothing.
        """
        allowed = int(self.total * utilization)
        left = allowed - self.used - self.outside
        if left <= 0:
            raise InvalidArgumentError(
                "gpu_memory_utilization",
                f"{utilization} of {gib(self.total)} allows {gib(allowed)}, but the weights and "
                f"the largest step take {gib(self.used)} and other programs on this GPU "
                f"{gib(self.outside)}: nothing is left for the KV cache; raise it, lower "
                "max_num_batched_tokens or max_num_seqs, or use a smaller model or dtype",
            )
        return left


def measure_largest_step(run: Callable[[], object], device: torch.device) -> DeviceMemory:
    """What a GPU's memory looks like at the peak of a step.

    Args:
        run: makes the step, with the smallest KV cache that will do.
        device: a CUDA device.

    Raises:
        InvalidArgumentError: the step does not fit beside the weights.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free_before = torch.cuda.mem_get_info(device)[0]
    try:
        run()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise InvalidArgumentError(
            "max_num_batched_tokens",
            f"the largest step does not fit in the {gib(free_before)} that the weights leave on "
            f"{device}; lower it, max_num_seqs or max_model_len, or use a smaller model or dtype",
        ) from error
    used = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What torch does not count.
    outside = total - free - torch.cuda.memory_reserved(device)
    return DeviceMemory(total=total, used=used, outside=outside)


def measure_graphs(
    capture: Callable[[GraphSet], object], sizes: GraphSizes, device: torch.device
) -> int:
    """Bytes of a GPU that CUDA graphs of these sizes will take.

    Of each kind the largest is captured, whose memory the others share, and another, for what each
    takes of its own.

    Args:
        capture: records graphs; they are let go of afterwards.
        sizes: of the graphs.
        device: a CUDA device.
    """
    recorder = CudaRecorder(device)
    capture(sizes.graphs(recorder, most=2))
    capture(GraphSet())
    torch.cuda.empty_cache()
    taken = iter(recorder.taken)
    total = 0
    for all_sizes in sizes.kinds:
        own = list(itertools.islice(taken, min(len(all_sizes), 2)))
        if own:
            total += own[0] + (len(all_sizes) - 1) * own[-1]
    return total


@contextmanager
def must_fit(setting: str, what: str, device: torch.device) -> Iterator[None]:
    """Around allocations without which an engine can't serve.

    Raises:
        InvalidArgumentError: the device has no memory for them.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InvalidArgumentError(
            setting,
            f"no memory is left on {device} for {what}; lower it, or use a smaller model or dtype",
        ) from error


def gib(num_bytes: int) -> str:
    """Such as 1.5 GiB; what is small, in MiB or bytes."""
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
