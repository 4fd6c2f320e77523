"""A step for which the device has no memory."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagewire.errors import ResourceExhaustedError

logger = logging.getLogger(__name__)

# For host memory torch raises plain RuntimeErrors: its allocator's, and those of strerror(ENOMEM).
_NO_HOST_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory")


@contextmanager
def telling_exhaustion(device: torch.device) -> Iterator[None]:
    """Around a step: tells that there was no memory for it from all else that can go wrong.

    What the step had allocated is free again when this raises, for a smaller one.

    Raises:
        ResourceExhaustedError: there was none.
    """
    try:
        yield
        return
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_exhaustion(error):
            raise
        logger.exception("a step found no memory on %s", device)
        # The frames that it came through keep every tensor of the step.
        traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise ResourceExhaustedError(
        f"there is no memory left on {device} for this request's part of a step; lower "
        "max_num_batched_tokens, max_num_seqs or the memory of the KV cache"
    )


def _is_exhaustion(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in _NO_HOST_MEMORY)
