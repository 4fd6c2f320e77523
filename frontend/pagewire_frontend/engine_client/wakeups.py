"""When consumers hear of new tokens: at once, or under load in turns.

A message to a client costs the event loop far more than a token does. Where frames come so fast
that one message a stream and frame would fill the loop, each stream hears of every second frame (or
third, fourth) only, and the streams take turns: of a frame's consumers half (or a third, a quarter)
wake at once, with what the frames before have left them, the others with the frames that follow. So
the loop has as much to do after each frame, and no token waits behind a burst of all streams'
messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from pagewire_frontend.engine_client.mailbox import Mailbox

# A loop can write some 20-40 thousand messages a second; from a third of that on it pays to halve
# them, where the next frame is no further than this.
BUSY_WAKEUPS_PER_S = 8_000
HOLD_S = 0.004
# From here on gRPC's messages alone may fill it: frames of 256 streams, 8 ms apart, are worth
# waiting for too, so many that these are left. Below it, SSE's events would only come later.
FULL_WAKEUPS_PER_S = 22_000
LONG_HOLD_S = 0.025
MOST_FRAMES = 4
_SMOOTHING = 0.1


class Wakeups:
    """Wakes mailboxes. One event loop owns it."""

    def __init__(self) -> None:
        # With the number of the first frame that each was held at.
        self._held: dict[int, tuple[int, Mailbox]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_frame = 0.0
        self._interval_s = 1.0
        self._num_frames = 0

    def after_frame(self, touched: Mapping[int, Mailbox], urgent: Mapping[int, Mailbox]) -> None:
        """A frame has put something into the mailboxes.

        Args:
            touched: all that it has, by the numbers of their streams.
            urgent: those of them whose consumers wait for their first token or their end.
        """
        now = time.monotonic()
        passed = now - self._last_frame
        self._last_frame = now
        self._interval_s += _SMOOTHING * (min(passed, 1.0) - self._interval_s)
        num_frames, hold_s = self._frames_a_wakeup(len(touched))
        if num_frames == 1:
            self.flush()
            for mailbox in touched.values():
                mailbox.wake()
            return
        # Counted on, whatever the number of turns: it may change from frame to frame, and whose
        # turn has not come for so many frames is woken. By frames and not by the clock: after a
        # moment in which the loop stood still all would be late, and wake together.
        self._num_frames += 1
        turn = self._num_frames % num_frames
        held = self._held
        overdue = self._num_frames - MOST_FRAMES
        for number in [number for number in held if number not in touched]:
            since, mailbox = held[number]
            if number % num_frames == turn or since <= overdue:
                del held[number]
                mailbox.wake()
        for number, mailbox in touched.items():
            since, _ = held.get(number) or (self._num_frames, mailbox)
            if number % num_frames == turn or number in urgent or since <= overdue:
                held.pop(number, None)
                mailbox.wake()
            else:
                held[number] = since, mailbox
                mailbox.hold()
        self._flush_unless_more_comes(hold_s)

    def _frames_a_wakeup(self, num_touched: int) -> tuple[int, float]:
        """How many frames share a wakeup, and for how long each may wait for the next one."""
        interval_s = self._interval_s
        if num_touched <= BUSY_WAKEUPS_PER_S * interval_s:
            return 1, 0.0
        if num_touched <= FULL_WAKEUPS_PER_S * interval_s:
            return (2, HOLD_S) if interval_s < HOLD_S else (1, 0.0)
        wanted = min(1 + int(num_touched / (FULL_WAKEUPS_PER_S * interval_s)), MOST_FRAMES)
        affordable = 1 + int(LONG_HOLD_S / interval_s)
        num_frames = min(wanted, affordable)
        return num_frames, LONG_HOLD_S / max(1, num_frames - 1)

    def _flush_unless_more_comes(self, hold_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(hold_s, self.flush)

    def flush(self) -> None:
        """Wakes those that were held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            held, self._held = self._held, {}
            for _, mailbox in held.values():
                mailbox.wake()
