"""What engine and workers tell one another of adapters: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Where an adapter's files are.

    Attributes:
        path: an absolute folder.
        root: no file may lie outside this folder, links followed; "": files may lie anywhere.
    """

    path: str
    root: str = ""


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """What a worker found in an adapter's files.

    Attributes:
        weights_version: SHA-256 (hex) of config and weights.
        rank: the largest of its modules'.
        alpha: of modules without a pattern of their own.
        use_rslora: whether products are scaled by 1 / sqrt(rank).
        modules: last parts of the names of the modules it changes, sorted.
        num_bytes: of its weights in host memory.
        base_model: what its config names as the model it was trained on.
    """

    weights_version: str
    rank: int
    alpha: float
    use_rslora: bool
    modules: list[str]
    num_bytes: int
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Where adapters are, by the engine's numbers.

    Attributes:
        host: those whose weights are in host memory.
        device: those with a place on the device, and the bytes that each takes there beside its
            host copy.
        num_host_loads, num_device_loads: since the worker's start.
    """

    host: list[int]
    device: dict[int, int]
    num_host_loads: int = 0
    num_device_loads: int = 0
