"""Which frames of the delta wire are accepted: in order, each once."""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    """What to do with a frame."""

    ACCEPT = auto()
    DUPLICATE = auto()
    GAP = auto()


class FrameOrder:
    """The receiver's side of the frame numbers.

    A rewind voids the frames sent before it: the engine sends what they held again, from
    `base_frame` on. So a receiver that waits for an earlier number jumps there.

    Attributes:
        acknowledgeable: every frame up to this was accepted or voided.
    """

    def __init__(self) -> None:
        self.acknowledgeable = 0

    def admit(self, frame: int, base_frame: int) -> Verdict:
        """Judges a frame and, if it is to be accepted, counts it."""
        if frame <= self.acknowledgeable:
            return Verdict.DUPLICATE
        self.acknowledgeable = max(self.acknowledgeable, base_frame - 1)
        if frame != self.acknowledgeable + 1:
            return Verdict.GAP
        self.acknowledgeable = frame
        return Verdict.ACCEPT
