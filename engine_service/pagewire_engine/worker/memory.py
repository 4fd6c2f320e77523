"""How much memory the KV blocks may take."""

from __future__ import annotations

from pathlib import Path

import psutil

_GIB = 1 << 30
# On CPU the pool shares the machine with everything else: a share, and never more than this.
_CPU_SHARE = 0.4
_CPU_LIMIT = 4 * _GIB
# Where swapped blocks leave a GPU they go to memory that is locked; on CPU they go from one place
# in the same memory to another.
_SWAP_LIMITS = {"cuda": 4 * _GIB, "cpu": _GIB}
_SWAP_SHARE = 0.1
# Limit, usage and statistics of a container's memory; version 2, then version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def default_cpu_cache_bytes() -> int:
    """A share of the memory that is free now."""
    return min(int(_CPU_SHARE * available_bytes()), _CPU_LIMIT)


def default_swap_bytes(device_type: str) -> int:
    """4 GiB for a GPU, as in vLLM, and less for a CPU or where little is free."""
    return min(int(_SWAP_SHARE * available_bytes()), _SWAP_LIMITS[device_type])


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Free memory of the machine, or of the container where that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file, stat_file, cached_name in _CGROUP_FILES:
        try:
            limit = int((cgroup / limit_file).read_text())
            usage = int((cgroup / usage_file).read_text())
            statistics = (cgroup / stat_file).read_text().splitlines()
            # Files that were read, weights above all, count as used until somebody needs the room.
            cached = int(dict(line.split() for line in statistics).get(cached_name, 0))
        except (OSError, ValueError):  # not in such a cgroup, or its limit is "max"
            continue
        available = min(available, max(limit - (usage - cached), 0))
    return available
