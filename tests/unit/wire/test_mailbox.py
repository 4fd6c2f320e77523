"""The frontend's mailbox of one request."""

from __future__ import annotations

import asyncio

import pytest

from pagewire.errors import InternalError
from pagewire.outputs import FinishReason
from pagewire_frontend.engine_client.mailbox import Mailbox, MissingTokensError


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
