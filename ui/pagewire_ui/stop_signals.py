"""Who wants no more of which answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

# Stops whose answers have not begun, of all visitors: such as have ended already are among them.
_MOST_EARLY = 1024


class StopSignals:
    """A signal for each answer that is on its way, by Gradio's session and the answer's own id."""

    def __init__(self) -> None:
        self._signals: dict[str, dict[str, asyncio.Event]] = {}
        self._early: OrderedDict[tuple[str, str], None] = OrderedDict()

    def begun(self, session: str | None, answer: str) -> asyncio.Event:
        """The signal of an answer that begins. On a slow link "stop" may have come before it."""
        key = session or "", answer
        signal = self._signals.setdefault(key[0], {}).setdefault(answer, asyncio.Event())
        if key in self._early:
            del self._early[key]
            signal.set()
        return signal

    def ended(self, session: str | None, answer: str) -> None:
        """Nothing more comes of this answer."""
        signals = self._signals.get(session or "", {})
        signals.pop(answer, None)
        if not signals:
            self._signals.pop(session or "", None)

    def stop(self, session: str | None, answer: str) -> None:
        """Ends an answer, also one that is still to begin: of these the last ones count."""
        key = session or "", answer
        signal = self._signals.get(key[0], {}).get(answer)
        if signal is not None:
            signal.set()
            return
        self._early[key] = None
        if len(self._early) > _MOST_EARLY:
            self._early.popitem(last=False)

    def stop_before(self, session: str | None, number: int) -> None:
        """Ends a visitor's answers of smaller numbers; this one, where one of a larger is on its
        way: its question was overtaken."""
        running = self._signals.get(session or "", {})
        for each, signal in running.items():
            if int(each) < number:
                signal.set()
        if any(int(each) > number for each in running):
            self.stop(session, str(number))

    def stop_all(self, session: str | None) -> None:
        """Ends all answers of a visitor."""
        for signal in self._signals.pop(session or "", {}).values():
            signal.set()
