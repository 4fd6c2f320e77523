"""Which operators the backends dispatched: for tests that must see that no other one stood in."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

# Kept for the whole process: engines compute on threads of their own.
_open_records: list[Counter[str]] = []


def note(operator: str) -> None:
    """Counts a launch in every open record; without one it does nothing."""
    for record in _open_records:
        record[operator] += 1


@contextlib.contextmanager
def recorded() -> Iterator[Counter[str]]:
    """What is dispatched meanwhile, by any thread: launches by the operator's name.

    Operators that a CUDA graph replays are those noted when it was captured.
    """
    record: Counter[str] = Counter()
    _open_records.append(record)
    try:
        yield record
    finally:
        # By identity: counters compare equal by what they counted.
        _open_records[:] = [other for other in _open_records if other is not record]
