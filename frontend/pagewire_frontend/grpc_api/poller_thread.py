"""gRPC's own thread beside the event loop: it should not interrupt it for each message.

`grpc.aio` has one thread that takes completed operations from core and wakes the event loop for
them. Where both share a processor, the kernel lets the thread preempt the loop as soon as an
operation completes: two context switches and a wake-up for every message. As SCHED_BATCH it runs
when the loop waits or the scheduler's tick comes, and hands over what has gathered meanwhile: half
the processor time a message. On a processor of its own it runs as before.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

# Python names a thread after its function; this is grpc.aio's.
_FUNCTION = "_poll_wrapper"


def let_poller_wait() -> int:
    """Makes it so, once `grpc.aio` is in use in this process.

    Returns:
        How many threads it found: 0 where the system has no such policy, or grpcio other names.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    found = 0
    for thread in threading.enumerate():
        if _FUNCTION in thread.name and thread.native_id is not None:
            try:
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
                found += 1
            except OSError as error:  # a container's seccomp rules may forbid it
                logger.debug("gRPC's thread keeps its scheduling policy: %s", error)
    return found
