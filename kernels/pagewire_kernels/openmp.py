"""The threads that torch's OpenMP keeps ready."""

from __future__ import annotations

import ctypes
import os

# GNU's, which torch for Linux brings along.
_LIBRARY = "libgomp.so.1"
_SOFT = 1  # omp_pause_soft: what a thread has set stays


def release_threads() -> bool:
    """Ends the threads that OpenMP keeps ready for the calling one; the next loop starts others.

    Every thread that once ran a parallel loop keeps a team, and all teams are counted: while there
    are more threads than CPUs, those that wait for the next loop go to sleep at once, and waking
    them costs each loop tens of microseconds. So the thread that loaded a model calls this before
    another one runs it. (The C++ kernels have threads of their own: csrc/team.h.)

    Returns:
        Whether there is a GNU OpenMP in this process, which was told.
    """
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        pause = library.omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    return bool(pause(_SOFT) == 0)
