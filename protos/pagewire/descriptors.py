"""File descriptors: how many a process may still open."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

_OPEN = "/proc/self/fd"
_UNKNOWN = 1 << 20
_NONE_LEFT = errno.EMFILE, errno.ENFILE


def raise_descriptor_limit() -> None:
    """Lets this process open as many files as its parents allow: shells start programs with a
    limit of 1024, which that many clients reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


def spare_descriptors() -> int:
    """How many more files this process may open; many where that can't be known."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _UNKNOWN
    try:
        # Linux 6.2 and later tells their number so; to list 10,000 of them takes milliseconds.
        return limit - (os.stat(_OPEN).st_size or len(os.listdir(_OPEN)))
    except OSError as error:
        # Without a descriptor the folder can't be read; without the folder nothing is known.
        return 0 if error.errno in _NONE_LEFT else _UNKNOWN
