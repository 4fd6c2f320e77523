"""Linux's leave to use the processor's matrix registers (Intel AMX).

They are large, and a switch of threads saves those that are in use: a process must ask for them.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

# arch_prctl(2), and what Linux's Documentation/arch/x86/xstate.rst asks by it.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@functools.cache
def request_permission() -> bool:
    """Asks Linux, for this process and its threads; returns whether it was granted."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    libc = ctypes.CDLL(None)
    refused = libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return int(refused) == 0
