"""gRPC's thread does not preempt the event loop for each message."""

from __future__ import annotations

import errno
import os
import sys
import threading

import pytest

from pagewire_frontend.grpc_api.poller_thread import let_poller_wait
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, grpc_stub, running_frontend


def why_not() -> OSError | None:
    """What this system says to a thread that changes its own policy."""
    told: list[OSError] = []

    def change() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            told.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    return told[0] if told else None


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
async def test_a_servers_poller_waits_for_its_turn_and_messages_still_come() -> None:
    if (error := why_not()) and error.errno in (errno.EPERM, errno.EACCES, errno.EINVAL):
        pytest.skip(f"this system lets no thread change its scheduling policy: {error}")
    async with running_frontend(FakeEngineClient()) as server, grpc_stub(server) as stub:
        assert let_poller_wait() == 1, "grpcio calls its thread by another name"
        policies = {
            thread.name: os.sched_getscheduler(thread.native_id)
            for thread in threading.enumerate()
            if thread.native_id is not None
        }
        batch = [name for name, policy in policies.items() if policy == os.SCHED_BATCH]
        assert len(batch) == 1
        assert threading.main_thread().name not in batch
        assert [message async for message in stub.Chat(chat_request())]


def test_a_kernel_that_forbids_it_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("seccomp")

    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(30,), name="x (_poll_wrapper)")
    thread.start()
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    try:
        assert let_poller_wait() == 0
    finally:
        # By its name it would be counted as gRPC's.
        ended.set()
        thread.join()
