"""When consumers hear of new tokens: at once, or under load for two frames together.

A message to a client costs the event loop far more than a token does. Where frames come so fast
that one message a stream and frame would fill the loop, every other frame waits for the next one,
for a few milliseconds at most, and a few more where the loop would be full: half the messages, of
two tokens each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from pagewire_frontend.engine_client.mailbox import Mailbox

# A loop can write some 20-30 thousand messages a second; from a third of that on it pays to halve
# them.
BUSY_WAKEUPS_PER_S = 8_000
HOLD_S = 0.004
# From here on gRPC's messages alone would fill it: frames of 256 streams, 8 ms apart, are worth
# waiting for too. Below it, SSE's events would only come later. Counted from the last wakeup, so
# that it spans two such frames.
FULL_WAKEUPS_PER_S = 22_000
LONG_HOLD_S = 0.025
_SMOOTHING = 0.1


class Wakeups:
    """Wakes mailboxes. One event loop owns it."""

    def __init__(self) -> None:
        self._held: dict[Mailbox, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_frame = 0.0
        self._last_wake = 0.0
        self._interval_s = 1.0

    def after_frame(self, touched: Collection[Mailbox], urgent: Collection[Mailbox]) -> None:
        """A frame has put something into the mailboxes.

        Args:
            touched: all that it has.
            urgent: those of them whose consumers wait for their first token or their end.
        """
        now = time.monotonic()
        passed = now - self._last_frame
        self._last_frame = now
        self._interval_s += _SMOOTHING * (min(passed, 1.0) - self._interval_s)
        since_wake = now - self._last_wake
        hold_s = self._hold_s(len(touched))
        if not self._held and since_wake < hold_s:
            self._held = dict.fromkeys(touched)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(hold_s - since_wake, self.flush)
            for mailbox in touched:
                mailbox.hold()
            for mailbox in urgent:
                mailbox.wake()
            return
        self.flush()
        self._last_wake = now
        for mailbox in touched:
            mailbox.wake()

    def _hold_s(self, num_touched: int) -> float:
        """For how long a frame may wait for the next one."""
        if num_touched > FULL_WAKEUPS_PER_S * self._interval_s:
            return LONG_HOLD_S
        return HOLD_S if num_touched > BUSY_WAKEUPS_PER_S * self._interval_s else 0.0

    def flush(self) -> None:
        """Wakes those that were held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            held, self._held = self._held, {}
            self._last_wake = time.monotonic()
            for mailbox in held:
                mailbox.wake()
