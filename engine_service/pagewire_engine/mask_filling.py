"""Makes the masks of many sequences at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pagewire_engine.grammar_matcher import Matcher
from pagewire_engine.token_bytes import Bits

# All sequences of a step wait for its masks, which take some 50 us each. A new part of a grammar
# may take 30 ms, once; who needs as long again and again holds up the others.
_SLOW_MASK_S = 0.02


def fill_masks(matchers: Sequence[Matcher], bits: Bits, address: int) -> None:
    """Writes what each matcher allows next into its row of `bits`.

    One kind of work is done for all, then the next: what the code of each needs stays in the
    caches, which the model's weights have gone through since the step before. By several threads
    it takes as long: matchers of one grammar wait for one another.

    Args:
        matchers: N of them.
        bits: uint32 [N, ceil(vocab_size / 32)], of any content.
        address: theirs; to ask numpy for it takes as long as a mask does.
    """
    left: list[tuple[int, Matcher]] = []
    watched: list[tuple[int, Matcher]] = []
    for index, matcher in enumerate(matchers):
        if matcher.is_free:
            left.append((index, matcher))
        elif (only := matcher.only_token()) is None:
            left.append((index, matcher))
            watched.append((index, matcher))
        else:
            row = bits[index]
            row[:] = 0
            row[only // 32] = 1 << only % 32
    num_bytes = bits.shape[1] * bits.itemsize
    clock = _Clock()
    for index, matcher in left:
        matcher.inner.unsafe_compute_mask_ptr(address + index * num_bytes, num_bytes)
        if clock.was_slow():
            matcher.notice_slow_mask()
    for index, matcher in watched:
        matcher.restrict(bits[index])
        if clock.was_slow():
            matcher.notice_slow_mask()


class _Clock:
    """Tells of one piece of work after the other whether it took this thread long. Time in which
    the thread did not run is not counted: others had the CPU then.

    A thread's own time is asked of the system, which takes much longer than to look at the wall's:
    it is asked for only where that was too long.
    """

    __slots__ = ("_asked_at", "_cpu_then", "_started")

    def __init__(self) -> None:
        self._cpu_then = time.thread_time()
        self._asked_at = self._started = time.perf_counter()

    def was_slow(self) -> bool:
        """Whether what was done since it was last asked, or made, took longer than a mask may."""
        started, self._started = self._started, time.perf_counter()
        if self._started - started <= _SLOW_MASK_S:
            return False
        cpu_then, self._cpu_then = self._cpu_then, time.thread_time()
        # What was done before took no more of the thread's time than of the wall's.
        before, self._asked_at = started - self._asked_at, self._started
        return self._cpu_then - cpu_then - before > _SLOW_MASK_S
