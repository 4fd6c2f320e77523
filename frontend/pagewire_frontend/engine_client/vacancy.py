"""Whether an engine is rid of what was told to leave it."""

from __future__ import annotations

# The one under way when the engine was told, and the one that was launched ahead of its end.
_STEPS = 2


class Vacancy:
    """Follows one session's unproven requests out of the engine. An abort that was answered takes
    effect before the next step: the request may still be in the one under way, and end the engine
    there. Heartbeats tell when that one is over.
    """

    def __init__(self) -> None:
        self._untold = 0
        self._beats = 0
        self._step: int | None = None
        self.clear = True

    def begin(self) -> None:
        """A request is told to leave."""
        self._untold += 1
        self.clear = False

    def told(self) -> None:
        """The engine has heard of it, or of the end of the session."""
        self._untold -= 1
        self._beats, self._step = 0, None

    def beat(self, step: int, busy: bool) -> bool:
        """A heartbeat has come.

        Returns:
            Whether the engine is clear since this one.
        """
        if self.clear or self._untold:
            return False
        self._beats += 1
        if self._beats == 1:
            return False  # it may have been sent before the engine was told
        if self._step is None:
            self._step = step
        self.clear = not busy or step >= self._step + _STEPS
        return self.clear
