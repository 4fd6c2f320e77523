"""How an unexpected exception is told: to the log without a request's content, to the client
without our insides."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pagewire.errors import ErrorCode, InternalError, PagewireError

logger = logging.getLogger(__name__)

# A lost engine takes seconds to restart.
_RESTART_S = 5.0


def as_pagewire_error(error: Exception) -> PagewireError:
    """The error itself where it is one of ours; else it is logged and an InternalError stands for
    it.

    The log gets the exception's type and frames but not its message, which may quote a prompt.
    """
    if isinstance(error, PagewireError):
        return error
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a request failed with %s\n%s", type(error).__name__, frames)
    return InternalError(
        f"the server failed on this request ({type(error).__name__}); its log says where"
    )


def retry_delay_s(error: PagewireError) -> float | None:
    """Seconds after which a retry makes sense; None where it makes none.

    A full queue says itself when to come again. What says nothing, as a request that the whole KV
    cache can't hold, would be refused again.
    """
    if error.retry_after_s is None and error.code == ErrorCode.UNAVAILABLE:
        return _RESTART_S
    return error.retry_after_s


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field name it as this endpoint does: a chat's prompt is its `messages`."""
    try:
        yield
    except PagewireError as error:
        error.field = names.get(error.field, error.field)
        raise
