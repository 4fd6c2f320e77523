"""Requests suspected of having killed an engine hold the others up no longer than they live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pagewire.errors import UnavailableError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.failover import SUSPICIOUS_DEATHS, EngineLink
from pagewire_frontend.engine_client.live_request import LiveRequest


@pytest.fixture
async def link() -> AsyncIterator[EngineLink]:
    link = EngineLink("127.0.0.1:1", 1.0)
    yield link
    await link.close()


def suspect(link: EngineLink) -> LiveRequest:
    live = LiveRequest(EngineRequest("r", [1], SamplingParams()), link._forget)
    link._lives[live] = None
    live.placed, live.deaths = True, SUSPICIOUS_DEATHS - 1
    link._count_death(live, trial=None)
    assert not link._cleared.is_set()
    return live


async def test_one_that_is_dropped_before_its_trial_has_begun(link: EngineLink) -> None:
    live = suspect(link)
    link._send_for(live)
    link.abandon(live)
    await asyncio.sleep(0)
    assert link._cleared.is_set()


async def test_one_that_fails_without_a_trial(link: EngineLink) -> None:
    suspect(link).mailbox.fail(UnavailableError("the engine came back with another model"))
    assert link._cleared.is_set()
