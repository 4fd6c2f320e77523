"""When a request passed the stations of its life, also where the engine is not asked for its
end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pagewire.outputs import RequestTimes


class PhaseTimes:
    """Keeps what the engine tells of a request's times, and completes it where a stop string ended
    the request here: to wait for the engine's word would hold the answer up for a step.

    Args:
        clock: seconds, monotonic.
    """

    __slots__ = ("_at_first_token", "_clock", "_first_token_at", "_told")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = RequestTimes()
        self._at_first_token: RequestTimes | None = None
        self._first_token_at = 0.0

    def take(self, times: RequestTimes, *, is_end: bool) -> None:
        """The engine's word, with the first token or with the end of a sequence."""
        self._told = times
        if not is_end:
            self._at_first_token = times
            self._first_token_at = self._clock()

    def final(self, *, num_tokens: int, ended_here: bool) -> RequestTimes:
        """The times of a request that has ended.

        Args:
            num_tokens: of its longest sequence: after the first, each took a step.
            ended_here: a stop string ended its last sequence, and the engine has told no end.
        """
        first = self._at_first_token
        if not ended_here or first is None:
            return self._told
        decode_s = self._clock() - self._first_token_at
        return replace(
            self._told,
            decode_s=decode_s,
            steps=first.steps + max(0, num_tokens - 1),
            step_s=first.step_s + decode_s,
        )
