"""The frontend's mailbox of one request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagewire.errors import InternalError
from pagewire.outputs import FinishReason, PositionLogprobs, TokenLogprob
from pagewire_frontend.engine_client import mailbox as mailbox_module
from pagewire_frontend.engine_client.mailbox import (
    BACKLOG_GRACE_S,
    BacklogError,
    Mailbox,
    MissingTokensError,
)


def mailbox(n: int = 1) -> Mailbox:
    return Mailbox(n, on_end=lambda: None)


async def test_what_came_since_the_last_turn_is_one_delta() -> None:
    box = mailbox()
    box.add_tokens(0, 0, [1, 2])
    box.add_tokens(0, 2, [3])
    box.wake()
    (delta,) = await box.take()
    assert (delta.start, delta.token_ids) == (0, [1, 2, 3])


async def test_known_tokens_are_dropped_by_their_index() -> None:
    box = mailbox()
    box.add_tokens(0, 0, [1, 2])
    box.add_tokens(0, 0, [1, 2])
    box.add_tokens(0, 1, [2, 3])
    (delta,) = await box.take()
    assert delta.token_ids == [1, 2, 3]


def test_a_hole_is_an_error() -> None:
    with pytest.raises(MissingTokensError):
        mailbox().add_tokens(0, 1, [1])
    with pytest.raises(MissingTokensError):
        mailbox().finish(0, FinishReason.STOP, num_tokens=1)


async def test_a_cancelled_wait_loses_nothing() -> None:
    box = mailbox()
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.add_tokens(0, 0, [1])
    box.wake()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await box.take())[0].token_ids == [1]


async def test_an_error_comes_after_what_came_before_it() -> None:
    box = mailbox()
    box.add_tokens(0, 0, [1])
    box.fail(InternalError("broken"))
    assert (await box.take())[0].token_ids == [1]
    with pytest.raises(InternalError, match="broken"):
        await box.take()


async def test_a_finished_sequence_delivers_nothing_more() -> None:
    ended = []
    box = Mailbox(2, on_end=lambda: ended.append(True))
    box.add_tokens(0, 0, [1])
    box.add_tokens(1, 0, [1])
    box.mute(0, FinishReason.STOP)
    box.add_tokens(0, 1, [2])
    box.add_tokens(0, 2, [3])
    deltas = await box.take()
    assert [delta.sequence_index for delta in deltas] == [1]
    assert not ended
    box.finish(1, FinishReason.LENGTH, num_tokens=1)
    assert ended == [True]
    assert (await box.take())[0].finish_reason is FinishReason.LENGTH
    assert await box.take() == []


def limited(**settings: Any) -> Mailbox:
    return Mailbox(1, on_end=lambda: None, max_backlog_bytes=1000, **settings)


async def test_a_consumer_that_takes_nothing_is_given_up_when_too_much_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(mailbox_module.time, "monotonic", lambda: now)
    box = limited()
    box.add_tokens(0, 0, [1] * 1000)
    now += BACKLOG_GRACE_S / 2
    box.add_tokens(0, 1000, [2])
    now += BACKLOG_GRACE_S
    with pytest.raises(BacklogError):
        box.add_tokens(0, 1001, [3])
    # What has come is told, before whatever error is made of it.
    (delta,) = await box.take()
    assert len(delta.token_ids) == 1002


async def test_a_consumer_that_takes_now_and_then_may_be_sent_any_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(mailbox_module.time, "monotonic", lambda: now)
    box = limited()
    for start in range(0, 10_000, 1000):
        box.add_tokens(0, start, [1] * 1000)
        now += 10 * BACKLOG_GRACE_S
        await box.take()


def test_log_probabilities_weigh_more_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(mailbox_module.time, "monotonic", lambda: now)
    position = PositionLogprobs(TokenLogprob(1, -0.5, 1), [TokenLogprob(1, -0.5, 1)] * 20)
    box = limited()
    box.add_tokens(0, 0, [1], [position])
    now += 2 * BACKLOG_GRACE_S
    with pytest.raises(BacklogError):
        box.add_tokens(0, 1, [1], [position])


def test_what_is_held_back_until_the_end_has_no_such_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(mailbox_module.time, "monotonic", lambda: now)
    box = limited(whole=True)
    for start in range(0, 10_000, 1000):
        box.add_tokens(0, start, [1] * 1000)
        now += 10 * BACKLOG_GRACE_S
