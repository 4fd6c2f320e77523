"""When consumers hear of new tokens."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from pagewire.errors import InternalError
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client import wakeups
from pagewire_frontend.engine_client.base import TokenDelta
from pagewire_frontend.engine_client.mailbox import Mailbox
from pagewire_frontend.engine_client.wakeups import Wakeups


class Flood:
    """Many consumers, and frames that come as fast as the test likes."""

    def __init__(self, streams: int) -> None:
        self.wakeups = Wakeups()
        self.mailboxes = [Mailbox(1, on_end=lambda: None) for _ in range(streams)]
        self.turns: list[list[TokenDelta]] = []
        self.consumers = [asyncio.create_task(self._consume(box)) for box in self.mailboxes]
        self.position = 0

    def frame(self) -> None:
        for box in self.mailboxes:
            box.add_tokens(0, self.position, [self.position])
        touched = dict(enumerate(self.mailboxes))
        self.position += 1
        self.wakeups.after_frame(touched, touched if self.position == 1 else {})

    def end(self) -> None:
        for box in self.mailboxes:
            box.finish(0, FinishReason.LENGTH, num_tokens=self.position)
        touched = dict(enumerate(self.mailboxes))
        self.wakeups.after_frame(touched, touched)

    async def _consume(self, box: Mailbox) -> None:
        while deltas := await box.take():
            self.turns.append(deltas)

    def sizes(self) -> list[int]:
        return [len(delta.token_ids) for turn in self.turns for delta in turn]


async def test_under_load_two_frames_share_a_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine that runs this is, the second frame of a pair comes in time.
    for name in ("HOLD_S", "LONG_HOLD_S"):
        monkeypatch.setattr(wakeups, name, 60.0)
    flood = Flood(256)
    for _ in range(100):
        flood.frame()
        await asyncio.sleep(0.0002)
    flood.end()
    await asyncio.gather(*flood.consumers)
    assert sum(flood.sizes()) == 256 * 100
    # Alone at first, while the rate is being learned, and then in pairs.
    assert len(flood.sizes()) < 256 * 80
    assert flood.sizes()[:256] == [1] * 256


async def test_under_load_each_frame_wakes_its_share_of_the_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not all at one frame and none at the next: their messages would queue behind one another."""
    now = [100.0]
    monkeypatch.setattr(wakeups.time, "monotonic", lambda: now[0])
    flood = Flood(256)
    woken = []
    for _ in range(200):
        now[0] += 0.008
        flood.frame()
        before = len(flood.turns)
        for _ in range(3):
            await asyncio.sleep(0)
        woken.append(len(flood.turns) - before)
    assert woken[-20:] == [128] * 20
    for consumer in flood.consumers:
        consumer.cancel()


async def test_a_stream_that_has_its_turn_need_not_be_in_the_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wakeups, "LONG_HOLD_S", 60.0)
    now = [100.0]
    monkeypatch.setattr(wakeups.time, "monotonic", lambda: now[0])
    flood = Flood(257)
    for _ in range(100):
        now[0] += 0.008
        flood.frame()
        for _ in range(3):
            await asyncio.sleep(0)
    # From now on the last one gets no more; nothing of it may wait for long.
    others = dict(enumerate(flood.mailboxes[:-1]))
    for _ in range(3):
        now[0] += 0.008
        flood.wakeups.after_frame(others, {})
        for _ in range(3):
            await asyncio.sleep(0)
    assert not flood.mailboxes[-1]._pending
    for consumer in flood.consumers:
        consumer.cancel()


@pytest.mark.parametrize(("turns", "most"), [((2, 3), 6), ((4,), 4), ((4, 3, 2), 6)])
async def test_each_stream_has_its_turn_soon_however_the_rate_changes(
    monkeypatch: pytest.MonkeyPatch, turns: tuple[int, ...], most: int
) -> None:
    num_frames = itertools.cycle(turns)
    monkeypatch.setattr(Wakeups, "_frames_a_wakeup", lambda *_: (next(num_frames), 60.0))
    flood = Flood(12)
    for _ in range(50):
        flood.frame()
        for _ in range(3):
            await asyncio.sleep(0)
    told = [turn[-1] for turn in flood.turns]
    assert max(len(delta.token_ids) for delta in told) <= most
    # What has come of each at all: none waits for ever.
    assert sum(flood.sizes()) >= 12 * (50 - most)
    for consumer in flood.consumers:
        consumer.cancel()


async def test_after_a_moment_of_standing_still_streams_do_not_wake_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wakeups, "_frames_a_wakeup", lambda *_: (4, 60.0))
    now = [100.0]
    monkeypatch.setattr(wakeups.time, "monotonic", lambda: now[0])
    flood = Flood(256)
    woken = []
    for number in range(20):
        now[0] += 0.1 if number == 15 else 0.008
        flood.frame()
        before = len(flood.turns)
        for _ in range(3):
            await asyncio.sleep(0)
        woken.append(len(flood.turns) - before)
    assert woken[10:] == [64] * 10
    for consumer in flood.consumers:
        consumer.cancel()


async def test_without_load_each_frame_wakes_at_once() -> None:
    flood = Flood(2)
    for _ in range(10):
        flood.frame()
        await asyncio.sleep(0.005)
        assert len(flood.sizes()) == 2 * flood.position
    for consumer in flood.consumers:
        consumer.cancel()


@pytest.mark.parametrize(("streams", "is_held"), [(256, True), (160, False)])
async def test_a_full_loop_waits_for_a_frame_that_is_milliseconds_away(
    monkeypatch: pytest.MonkeyPatch, streams: int, is_held: bool
) -> None:
    """30,000 messages a second are more than gRPC can write on a core; 20,000 events are not."""
    # The clock below is not the loop's, whose timer is to be late.
    assert wakeups.LONG_HOLD_S > 2.5 * 0.008
    now = [100.0]
    monkeypatch.setattr(wakeups.time, "monotonic", lambda: now[0])
    flood = Flood(streams)
    for _ in range(200):
        now[0] += 0.008
        flood.frame()
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    turns = len(flood.sizes()) / streams
    assert turns < 140 if is_held else turns == 200
    for consumer in flood.consumers:
        consumer.cancel()


async def test_what_is_held_comes_soon_even_if_nothing_follows() -> None:
    flood = Flood(256)
    for _ in range(61):
        flood.frame()
        await asyncio.sleep(0.0002)
    await asyncio.sleep(0.5)  # much longer than anything is held
    assert sum(flood.sizes()) == 256 * 61
    for consumer in flood.consumers:
        consumer.cancel()


async def test_a_failure_is_never_held_back() -> None:
    box = Mailbox(1, on_end=lambda: None)
    box.hold()
    box.fail(InternalError("broken"))
    assert box.error is not None
    with_error = asyncio.create_task(box.take())
    await asyncio.wait((with_error,), timeout=60)
    assert isinstance(with_error.exception(), InternalError)
