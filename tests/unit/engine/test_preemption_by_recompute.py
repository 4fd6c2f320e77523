"""Out of blocks: the lowest-priority, latest-arrived request is computed again later, and nobody
can tell from its answer."""

from __future__ import annotations

import logging

import pytest

from pagewire.errors import ResourceExhaustedError
from pagewire.outputs import FinishReason
from tests.unit.engine.harness import Harness, alone, settings, submission

SMALL_POOL = settings(num_blocks=6, max_num_batched_tokens=16)


def test_preempted_requests_answer_as_if_alone() -> None:
    harness = Harness(SMALL_POOL)
    requests = [submission(str(i), range(i, i + 7), max_tokens=10) for i in range(3)]
    harness.add(*requests)
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_seeded_sampling_of_several_sequences_survives_preemption() -> None:
    harness = Harness(settings(num_blocks=9, max_num_batched_tokens=16))
    requests = [
        submission(str(i), range(i, i + 6), n=2, temperature=0.7, seed=i, max_tokens=9)
        for i in range(3)
    ]
    harness.add(*requests)
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    for request in requests:
        answer = harness.tokens(request.request_id)
        assert answer == alone(request)
        assert answer[0] != answer[1]


def test_sequences_share_their_prompt_again_after_preemption() -> None:
    """Else a request that once fit would not fit when it comes back."""
    harness = Harness(settings(num_blocks=9))
    harness.add(submission("first", range(8), max_tokens=14))
    harness.step()
    harness.add(submission("many", range(14), n=3, max_tokens=6))
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert harness.requests["many"].error is None
    assert harness.tokens("many") == alone(submission("many", range(14), n=3, max_tokens=6))


def test_the_latest_of_the_lowest_priority_gives_way() -> None:
    harness = Harness(settings(num_blocks=6))
    harness.add(
        submission("low", range(7), priority=1),
        submission("high", range(7), priority=0),
        submission("low, later", range(7), priority=1),
    )
    preempted: list[str] = []
    while harness.engine.has_work:
        harness.step()
        preempted += [
            request.request_id
            for request in harness.engine.queues.waiting
            if request.num_preemptions and request.request_id not in preempted
        ]
    assert preempted[0] == "low, later"
    assert "high" not in preempted


def test_a_request_that_outgrows_the_pool_alone_fails_and_the_engine_lives() -> None:
    harness = Harness(settings(num_blocks=4))
    harness.add(submission("big", range(6), max_tokens=100))
    harness.run(max_steps=30)
    assert isinstance(harness.requests["big"].error, ResourceExhaustedError)
    assert "kv-cache-memory" in str(harness.requests["big"].error)
    # 16 slots hold 6 + 10 tokens; the 11th comes from the last of them.
    assert [len(tokens) for tokens in harness.tokens("big")] == [11]
    request = submission("next", range(6))
    harness.add(request)
    harness.run()
    assert harness.tokens("next") == alone(request)


def test_sequences_that_outgrow_the_pool_together_fail_together() -> None:
    harness = Harness(settings(num_blocks=6))
    harness.add(submission("50", range(6), n=16, max_tokens=4))
    harness.run(max_steps=30)
    assert isinstance(harness.requests["50"].error, ResourceExhaustedError)


def test_requests_that_can_not_run_together_take_turns() -> None:
    """Each needs five of the six blocks in the end."""
    harness = Harness(settings(num_blocks=6))
    requests = [submission(str(i), range(i, i + 5), max_tokens=15) for i in range(4)]
    harness.add(*requests)
    harness.run(max_steps=200)
    assert harness.engine.stats().num_preemptions >= 3
    for request in requests:
        assert harness.tokens(request.request_id) == alone(request)


def test_prompt_logprobs_are_told_once_each() -> None:
    """vllm#3251 and kin: one entry a position, whatever was computed again."""
    harness = Harness(settings(num_blocks=7, max_num_batched_tokens=5))
    harness.add(submission("first", range(10), max_tokens=16))
    harness.add(submission("second", range(11), prompt_logprobs=2, max_tokens=5))
    harness.run()
    told = harness.requests["second"].prompt_logprobs
    assert harness.engine.stats().num_preemptions > 0
    assert [position.token.token_id for position in told] == list(range(1, 11))


def test_a_request_preempted_between_chunks_of_its_prompt_starts_over() -> None:
    harness = Harness(settings(num_blocks=7, max_num_batched_tokens=5))
    harness.add(submission("first", range(4), max_tokens=20))
    for _ in range(8):
        harness.step()
    second = submission("second", range(15), prompt_logprobs=0, max_tokens=4)
    harness.add(second)
    harness.step()
    assert harness.requests["second"].tokens == {}
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert harness.tokens("second") == alone(second)
    assert len(harness.requests["second"].prompt_logprobs) == 14


def test_the_warning_names_cause_advice_and_count(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(SMALL_POOL)
    harness.add(*(submission(str(i), range(7), max_tokens=10) for i in range(3)))
    with caplog.at_level(logging.WARNING, "pagewire_engine.queues"):
        harness.run()
    assert len(caplog.messages) == 1
    assert "not enough free KV blocks" in caplog.messages[0]
    assert "--kv-cache-memory" in caplog.messages[0]
    assert "Preemptions since start: 1." in caplog.messages[0]


def test_times_tell_of_preemptions() -> None:
    harness = Harness(SMALL_POOL)
    harness.add(*(submission(str(i), range(7), max_tokens=10) for i in range(3)))
    harness.run()
    told = [
        end.times.preemptions
        for recorded in harness.requests.values()
        for end in recorded.ends.values()
        if end.times is not None
    ]
    assert sum(told) == harness.engine.stats().num_preemptions
    assert harness.requests["0"].reasons == {0: FinishReason.LENGTH}
