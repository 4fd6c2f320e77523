"""Constraints that take long to compile hold up who waits for them, and no other call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from pagewire.conversion import sampling_params_to_proto
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import StructuredOutput
from pagewire.v1 import engine_pb2
from pagewire_engine import servicer
from pagewire_engine.submission import Submission
from tests.e2e.wire_peer import TIMEOUT_S, WirePeer, wait_until
from tests.fakes.fake_engine import FakeEngine


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Future[Any]]]:
    """What is being compiled, and will not be done before a test says so."""
    futures: list[Future[Any]] = []

    def start(compiler: object, submission: Submission) -> Future[Any] | None:
        if submission.sampling_params.structured_output is None:
            return None
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr(servicer, "start_compiling", start)
    yield futures
    for future in futures:
        if not future.done():
            future.set_result(None)


def submit(peer: WirePeer, stream: int) -> Any:
    params = SamplingParams(max_tokens=2, structured_output=StructuredOutput(regex="a+"))
    request = engine_pb2.SubmitRequest(
        session_id=peer.attached.session_id,
        stream=stream,
        request_id=f"slow-{stream}",
        prompt_token_ids=[1, 2],
        sampling_params=sampling_params_to_proto(params),
    )
    return peer.stub.Submit.future(request, timeout=TIMEOUT_S)


def test_other_calls_are_answered_and_one_too_many_is_turned_away(
    compiling: list[Future[Any]],
) -> None:
    with FakeEngine() as engine, WirePeer(engine.target) as peer:
        peer.greet()
        calls = [submit(peer, number) for number in range(1, servicer.MAX_COMPILE_WAITS + 2)]
        # One finds no place; which one is not said.
        wait_until(lambda: any(call.done() for call in calls), "a refusal")
        refused = next(call for call in calls if call.done())
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "constraints" in refused.details()
        wait_until(lambda: len(compiling) == len(calls), "all have come")
        # Nobody waits for those that wait.
        peer.submit("plain", 1000)
        peer.abort("plain")
        next(iter(peer.stub.GetStats(engine_pb2.GetStatsRequest(), timeout=TIMEOUT_S)))
        waiting = [call for call in calls if call is not refused]
        assert not any(call.done() for call in waiting)
        for future in compiling:
            future.set_result(None)
        assert all(call.result(TIMEOUT_S) is not None for call in waiting)


def test_a_cancelled_call_gives_its_place_back(
    compiling: list[Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_COMPILE_WAITS", 1)
    with FakeEngine() as engine, WirePeer(engine.target) as peer:
        peer.greet()
        cancelled = submit(peer, 1)
        wait_until(lambda: len(compiling) == 1, "it has come")
        cancelled.cancel()
        # Until the thread that waits has seen that nobody waits for it.
        for number in range(2, 200):
            call = submit(peer, number)
            wait_until(lambda number=number: len(compiling) == number, "it has come")
            compiling[-1].set_result(None)
            if call.exception(TIMEOUT_S) is None:
                return
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            time.sleep(0.05)
        raise AssertionError("the place was not given back")
