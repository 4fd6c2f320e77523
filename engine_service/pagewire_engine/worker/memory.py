"""How much memory the KV blocks may take."""

from __future__ import annotations

from pathlib import Path

import psutil

_GIB = 1 << 30
# On CPU the pool shares the machine with everything else: a share, and never more than this.
_CPU_SHARE = 0.4
_CPU_LIMIT = 4 * _GIB
_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def default_cpu_cache_bytes() -> int:
    """A share of the memory that is free now."""
    return min(int(_CPU_SHARE * available_bytes()), _CPU_LIMIT)


def available_bytes() -> int:
    """Free memory of the machine, or of the container where that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_path, usage_path in _CGROUP_LIMITS:
        try:
            limit, usage = Path(limit_path).read_text(), Path(usage_path).read_text()
            available = min(available, max(int(limit) - int(usage), 0))
        except (OSError, ValueError):  # not in such a cgroup, or its limit is "max"
            continue
    return available
