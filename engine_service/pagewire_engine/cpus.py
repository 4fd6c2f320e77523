"""How many CPUs this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs of the affinity mask, or of the container's quota where that is less; at least 1.

    More threads than a quota pays for are stopped in the middle of each matrix product.
    """
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        cpus = min(cpus, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such cgroup, or its quota is "max"
        pass
    return max(1, cpus)


def model_threads(num_threads: int | None) -> int:
    """Threads of the model: as asked for, else as OMP_NUM_THREADS says, else one for each CPU."""
    if num_threads is not None:
        return num_threads
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else available_cpus()
