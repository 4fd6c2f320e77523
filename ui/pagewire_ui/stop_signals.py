"""Who wants no more of which answer."""

from __future__ import annotations

import asyncio

# Of one visitor. Those of answers that end in time are taken back at their end.
_MOST = 64


class StopSignals:
    """A signal for each answer that is on its way, by Gradio's session and the answer's own id."""

    def __init__(self) -> None:
        self._signals: dict[str, dict[str, asyncio.Event]] = {}

    def begun(self, session: str | None, answer: str) -> asyncio.Event:
        """The signal of an answer that begins. On a slow link "stop" may have come before it."""
        return self._signals.setdefault(session or "", {}).setdefault(answer, asyncio.Event())

    def ended(self, session: str | None, answer: str) -> None:
        """Nothing more comes of this answer."""
        signals = self._signals.get(session or "", {})
        signals.pop(answer, None)
        if not signals:
            self._signals.pop(session or "", None)

    def stop(self, session: str | None, answer: str) -> None:
        """Ends an answer, also one that is still to begin."""
        signals = self._signals.setdefault(session or "", {})
        if answer in signals or len(signals) < _MOST:
            signals.setdefault(answer, asyncio.Event()).set()

    def stop_others(self, session: str | None, answer: str) -> None:
        """Ends all answers of a visitor but this one."""
        for each, signal in self._signals.get(session or "", {}).items():
            if each != answer:
                signal.set()

    def stop_all(self, session: str | None) -> None:
        """Ends all answers of a visitor."""
        for signal in self._signals.pop(session or "", {}).values():
            signal.set()
