"""Thirty-two streams of all kinds that are caught in the middle, before a fault strikes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from tests.e2e.wire_peer import wait_until_async
from tests.fakes.standstill import stand_still
from tests.faults.mixed_streams import Answer, Case, MixedStreams

EARLIEST, LATEST = 0.2, 0.8
_ATTEMPTS = 10
_SETTLED_S = 0.5


class TooLateError(Exception):
    """A stream was almost at its end before all were well under way."""


class CaughtStreams:
    """Streams that run.

    Attributes:
        streams: what they have read so far.
        answers: awaited, what they have read in the end.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        http: str,
        target: str,
        new_answer: Callable[[], Answer] = Answer,
    ) -> None:
        self.streams = MixedStreams(cases, http, target, new_answer)
        self.answers = asyncio.create_task(self.streams.run())

    def shares(self, expected: Mapping[str, Answer]) -> list[float]:
        """How much of its tokens each stream has."""
        return [
            answer.num_tokens / expected[name].num_tokens
            for name, answer in self.streams.answers.items()
        ]

    async def reach_the_middle(self, expected: Mapping[str, Answer]) -> None:
        """Returns when all are well under way."""

        def under_way() -> bool:
            if self.answers.done():
                raise TooLateError
            return min(self.shares(expected)) > EARLIEST + 0.05

        await wait_until_async(under_way, "all streams are under way", timeout_s=240)

    async def settle(self) -> int:
        """Returns once nothing more comes; how many tokens there are."""
        answers = self.streams.answers.values()
        total, quiet_s = -1, 0.0
        while quiet_s < _SETTLED_S:
            await asyncio.sleep(0.05)
            now = sum(answer.num_tokens for answer in answers)
            quiet_s = quiet_s + 0.05 if now == total else 0.0
            total = now
        return total

    async def drop(self) -> None:
        """Leaves them."""
        self.answers.cancel()
        await asyncio.wait({self.answers})


async def catch_in_the_middle(
    cases: Sequence[Case],
    http: str,
    target: str,
    expected: Mapping[str, Answer],
    *engines: int,
) -> CaughtStreams:
    """Streams of which each has 20 to 80% of its tokens, and engines that stand still (SIGSTOP).

    A machine that was busy elsewhere may miss the moment; then it begins again.

    Args:
        cases: what to ask.
        http, target: the frontend's addresses.
        expected: undisturbed answers.
        engines: ids of their processes.
    """
    for _ in range(_ATTEMPTS):
        caught = CaughtStreams(cases, http, target)
        try:
            await caught.reach_the_middle(expected)
            for engine in engines:
                stand_still(engine)
            await caught.settle()
            shares = caught.shares(expected)
            if min(shares) >= EARLIEST and max(shares) <= LATEST:
                return caught
        except TooLateError:
            pass
        for engine in engines:
            os.kill(engine, signal.SIGCONT)
        await caught.drop()
    raise AssertionError("the streams were never all in the middle at once")
