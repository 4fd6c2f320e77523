"""Which adapters' requests may run: as many as a step can hold, in turns.

An adapter takes a place before its first request starts, and keeps it while it has some that run.
Where others wait in vain, places change hands: whoever has had one for a turn takes no newcomers,
and after another turn its requests are computed again later (SGLang's pull request 15129: with one
place and requests of adapters A, B, A, A, A, ... B must run in bounded time). What is computed
again has a turn from when it is back where it was: else a prompt of more than two turns would never
come to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Steps of a turn.
TURN_STEPS = 64
NO_ADAPTER = 0


class AdapterStore(Protocol):
    """Who has the adapters' weights. Adapters are called by the engine's numbers."""

    def want(self, number: int) -> None:
        """Its weights must be in host memory, and stay there; they are fetched meanwhile."""
        ...

    def let_go(self, number: int) -> None:
        """They need not stay."""
        ...

    def is_ready(self, number: int) -> bool:
        """Whether they are there."""
        ...

    def release(self, number: int) -> None:
        """A request that held the adapter has ended."""
        ...


@dataclass(slots=True)
class _Place:
    since: int
    closed: bool = False
    recomputed_at: int | None = None


class AdapterTurns:
    """The places, and whose they are.

    Args:
        num_places: adapters of one step.
        store: has their weights.
        turn_steps: see the module.
    """

    def __init__(self, num_places: int, store: AdapterStore, turn_steps: int = TURN_STEPS) -> None:
        self._num_places = num_places
        self._store = store
        self._turn_steps = turn_steps
        self._places: dict[int, _Place] = {}
        self._blocked_since: dict[int, int] = {}

    def awaits_weights(self, number: int) -> bool:
        """Whether an adapter has a place, and not its weights yet."""
        return number in self._places and not self._store.is_ready(number)

    def may_start(self, number: int) -> bool:
        """Whether a request of this adapter may start now."""
        if number == NO_ADAPTER:
            return True
        place = self._places.get(number)
        return place is not None and not place.closed and self._store.is_ready(number)

    def forget(self, number: int) -> None:
        """The adapter can't be had: it loses its place."""
        if self._places.pop(number, None) is not None:
            self._store.let_go(number)

    def release(self, number: int) -> None:
        """A request of this adapter has ended, and no step under way needs it."""
        if number != NO_ADAPTER:
            self._store.release(number)

    def change_places(
        self,
        step: int,
        running: Mapping[int, int],
        waiting: Sequence[tuple[int, int]],
        recomputed: Collection[int] = (),
    ) -> int:
        """Gives places to adapters whose requests wait.

        Args:
            step: the number of the step that is scheduled.
            running: adapters whose requests run or are swapped out, and the most urgent priority
                among them; lower is more urgent.
            waiting: adapters whose requests wait and the priority of the first, the most urgent
                first.
            recomputed: adapters of which a request was preempted and is not back where it was.

        Returns:
            An adapter whose running requests must make way; 0: none.
        """
        numbers = [number for number, _ in waiting]
        for number, place in self._places.items():
            place.closed = False
            if number in recomputed:
                place.recomputed_at = step
        blocked = [each for each in waiting if each[0] not in self._places]
        self._blocked_since = {
            number: self._blocked_since.get(number, step) for number, _ in blocked
        }
        for number, priority in blocked:
            if len(self._places) < self._num_places:
                self._give(number, step)
                continue
            idle = [each for each in self._places if each not in running and each not in numbers]
            leaving = idle[0] if idle else self._outsat(number, priority, step, running)
            if leaving is None:
                continue
            if leaving in running:
                place = self._places[leaving]
                # From now on none of it starts, so that nothing more has to be computed again.
                place.closed = True
                due = self._blocked_since[number] + 2 * self._turn_steps
                if place.recomputed_at is not None:
                    due = max(due, place.recomputed_at + self._turn_steps)
                return leaving if step >= due else NO_ADAPTER
            self.forget(leaving)
            self._give(number, step)
        return NO_ADAPTER

    def _give(self, number: int, step: int) -> None:
        self._places[number] = _Place(step)
        self._blocked_since.pop(number, None)
        self._store.want(number)

    def _outsat(
        self, number: int, priority: int, step: int, running: Mapping[int, int]
    ) -> int | None:
        """Whose turn is over, for one that has waited for a turn: the one that has had its place
        for longest, and runs nothing more urgent."""
        if step - self._blocked_since[number] < self._turn_steps:
            return None
        over = [
            (place.since, holder)
            for holder, place in self._places.items()
            if step - place.since >= self._turn_steps and running.get(holder, priority) >= priority
        ]
        return min(over)[1] if over else None
