"""What a session puts into its frames, and when."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes, TokenLogprob
from pagewire.v1.token_deltas_pb2 import StepDeltas
from pagewire_engine.outputs import PromptLogprobsOutput, SequenceOutput
from pagewire_engine.retention import MAX_FRAME_BYTES
from pagewire_engine.sessions import ACK_TIMEOUT_S, WINDOW, Session, Stream, StreamNumbers
from pagewire_frontend.engine_client.delivery import deliver
from pagewire_frontend.engine_client.mailbox import Mailbox
from tests.fakes.yardstick import at_most


def session() -> Session:
    made = Session("session", "secret", 1, 0.0)
    made.connect(b"peer", 0.0)
    return made


def open_stream(owner: Session, number: int = 1, n: int = 1) -> Stream:
    owner.use_number(number)
    return owner.open_stream(number, f"r{number}", dict.fromkeys(range(n), 0), 0)


def tokens(
    owner: Session,
    stream: Stream,
    start: int,
    ids: list[int],
    *,
    sequence: int = 0,
    end: bool = False,
) -> None:
    owner.record(
        stream,
        SequenceOutput(
            "r", sequence, start, ids, finish_reason=FinishReason.LENGTH if end else None
        ),
    )


def take(owner: Session, now: float = 0.0) -> StepDeltas:
    assert owner.can_send(now)
    return owner.take_frame(5, now).deltas


def test_a_slow_session_gets_one_long_run_instead_of_many_short_ones() -> None:
    owner = session()
    stream = open_stream(owner)
    for step in range(40):
        tokens(owner, stream, step, [step])
        if owner.can_send(0.0):
            owner.take_frame(step, 0.0)
    assert owner.num_unacknowledged == WINDOW
    owner.acknowledge(1, 0.0)
    frame = take(owner)
    assert (list(frame.start), list(frame.count)) == ([WINDOW], [40 - WINDOW])
    assert list(frame.token_id) == list(range(WINDOW, 40))


def test_the_times_before_the_first_token_go_with_it_until_it_is_acknowledged() -> None:
    owner = session()
    stream = open_stream(owner)
    times = RequestTimes(queue_s=1.0, prefill_s=2.0, cached_tokens=3, steps=4, step_s=5.0)
    owner.record(stream, SequenceOutput("r", 0, 0, [1], times=times))
    (started,) = take(owner).started
    assert (started.stream, started.sequence) == (1, 0)
    told = started.times
    assert (told.queue_s, told.prefill_s, told.steps, told.step_time_s) == (1.0, 2.0, 4, 5.0)
    assert told.cached_tokens == 3
    tokens(owner, stream, 1, [2])
    assert not take(owner).started
    owner.rewind()
    (again,) = take(owner).started
    assert again == started
    owner.acknowledge(3, 0.0)
    tokens(owner, stream, 2, [3])
    assert not take(owner).started


def test_a_long_prompts_log_probabilities_come_before_its_first_token() -> None:
    """Who reads a token takes them to be whole; they fill more than a frame here."""
    owner = session()
    stream = open_stream(owner)
    other = open_stream(owner, 2)
    position = PositionLogprobs(TokenLogprob(1, -1.0, 1), [])
    num_positions = MAX_FRAME_BYTES // 16 * 2 + 5
    owner.record_prompt(stream, PromptLogprobsOutput("r", 1, [position] * num_positions))
    tokens(owner, stream, 0, [7], end=True)
    tokens(owner, other, 0, [8])
    told = 0
    seen: list[int] = []
    while owner.can_send(0.0):
        frame = take(owner)
        told += sum(len(entry.positions) for entry in frame.prompt_logprobs)
        seen += frame.token_id
        if 7 in frame.token_id:
            assert told == num_positions
            assert len(frame.finished) == 1
    assert sorted(seen) == [7, 8]
    assert told == num_positions


def test_acknowledged_tokens_are_forgotten() -> None:
    owner = session()
    stream = open_stream(owner)
    tokens(owner, stream, 0, [1, 2, 3])
    take(owner)
    owner.acknowledge(1, 0.0)
    assert stream.logs[0].tokens == []
    assert stream.logs[0].first == 3


def test_a_stream_is_kept_until_its_end_is_acknowledged() -> None:
    owner = session()
    stream = open_stream(owner, n=2)
    tokens(owner, stream, 0, [1], sequence=0, end=True)
    take(owner)
    owner.acknowledge(1, 0.0)
    assert owner.streams
    tokens(owner, stream, 0, [1], sequence=1, end=True)
    take(owner)
    assert owner.streams
    owner.acknowledge(2, 0.0)
    assert not owner.streams


def test_the_sequence_column_is_left_out_while_all_are_zero() -> None:
    owner = session()
    stream = open_stream(owner, n=2)
    tokens(owner, stream, 0, [1], sequence=0)
    assert list(take(owner).sequence) == []
    tokens(owner, stream, 1, [2], sequence=0)
    tokens(owner, stream, 0, [3], sequence=1)
    assert list(take(owner).sequence) == [0, 1]


def test_an_overdue_acknowledgement_rewinds_and_then_single_frames_probe() -> None:
    owner = session()
    stream = open_stream(owner)
    for step in range(3):
        tokens(owner, stream, step, [step])
        take(owner)
    assert not owner.check_overdue(ACK_TIMEOUT_S * 0.9)
    assert owner.check_overdue(ACK_TIMEOUT_S)
    probe = take(owner, ACK_TIMEOUT_S)
    assert (probe.frame, probe.base_frame) == (4, 4)
    assert list(probe.token_id) == [0, 1, 2]
    tokens(owner, stream, 3, [3])
    assert not owner.can_send(ACK_TIMEOUT_S)
    # Growing intervals: a stopped frontend must not fill the buffers.
    assert not owner.check_overdue(2 * ACK_TIMEOUT_S)
    assert owner.check_overdue(3 * ACK_TIMEOUT_S)
    take(owner, 3 * ACK_TIMEOUT_S)
    owner.acknowledge(5, 3 * ACK_TIMEOUT_S)
    for step in range(4, 7):
        tokens(owner, stream, step, [step])
        take(owner, 3 * ACK_TIMEOUT_S)


def test_a_complaint_from_before_the_last_rewind_is_not_answered_twice() -> None:
    owner = session()
    stream = open_stream(owner)
    for step in range(3):
        tokens(owner, stream, step, [step])
        take(owner)
    owner.complain(1)
    assert take(owner).base_frame == 4
    owner.complain(1)
    assert owner.num_unacknowledged == 1
    owner.complain(3)
    assert owner.num_unacknowledged == 0


def test_an_acknowledgement_of_what_was_never_sent_is_ignored() -> None:
    owner = session()
    stream = open_stream(owner)
    tokens(owner, stream, 0, [1])
    take(owner)
    owner.acknowledge(99, 0.0)
    assert owner.num_unacknowledged == 1


def test_no_frame_is_larger_than_its_room_and_nothing_is_starved() -> None:
    owner = session()
    long, short = open_stream(owner, 1), open_stream(owner, 2)
    position = PositionLogprobs(TokenLogprob(1, -1.0, 1), [TokenLogprob(1, -1.0, 1)] * 20)
    owner.record(long, SequenceOutput("r", 0, 0, [1] * 3000, logprobs=[position] * 3000))
    tokens(owner, short, 0, [7])
    sizes, first_of_short, received = [], None, 0
    while owner.can_send(0.0):
        frame = take(owner)
        sizes.append(frame.ByteSize())
        received += sum(c for s, c in zip(frame.stream, frame.count, strict=True) if s == 1)
        if 2 in frame.stream and first_of_short is None:
            first_of_short = len(sizes)
        owner.acknowledge(frame.frame, 0.0)
    assert received == 3000
    assert len(sizes) > 2
    assert max(sizes) < 2 * MAX_FRAME_BYTES
    assert first_of_short == 2


def test_tokens_that_leave_a_hole_are_refused() -> None:
    owner = session()
    stream = open_stream(owner)
    with pytest.raises(ValueError, match="start at 2, not 0"):
        tokens(owner, stream, 2, [1])


def test_stream_numbers_may_come_out_of_order_but_only_once() -> None:
    numbers = StreamNumbers()
    assert [numbers.use(n) for n in (2, 1, 3, 2, 1, 0)] == [True, True, True, False, False, False]


def test_memory_for_stream_numbers_is_bounded_when_one_never_comes() -> None:
    numbers = StreamNumbers()
    for number in range(2, 20_000):
        assert numbers.use(number)
    assert len(numbers._used) < 5000
    assert not numbers.use(1)


def test_a_step_of_256_streams_is_built_in_well_under_a_millisecond() -> None:
    owner = session()
    streams = [open_stream(owner, number) for number in range(1, 257)]
    best = 1.0
    for step in range(30):
        for stream in streams:
            tokens(owner, stream, step, [step])
        began = time.thread_time()
        frame = owner.take_frame(step, 0.0)
        frame.SerializeToString()
        best = min(best, time.thread_time() - began)
        owner.acknowledge(step + 1, 0.0)
    # About 0.2 ms; the bound leaves room for busy machines.
    assert best < at_most(0.002)


def vector_end(values: list[float]) -> SequenceOutput:
    return SequenceOutput("r", 0, 0, [], finish_reason=FinishReason.STOP, vector=values)


def test_a_vector_goes_with_its_end_until_it_is_acknowledged() -> None:
    owner = session()
    stream = open_stream(owner)
    assert owner.record(stream, vector_end([0.5, -2.0]))
    first = take(owner)
    assert [(v.stream, v.sequence, list(v.values)) for v in first.vectors] == [(1, 0, [0.5, -2.0])]
    assert [end.reason for end in first.finished] == [int(FinishReason.STOP)]
    owner.rewind()
    again = take(owner)
    assert (again.vectors, again.finished) == (first.vectors, first.finished)
    owner.acknowledge(again.frame, 0.0)
    assert not owner.streams
    assert not owner.can_send(0.0)


def test_many_long_vectors_take_several_frames() -> None:
    owner = session()
    size = 4096
    for number in range(1, 41):
        owner.record(open_stream(owner, number), vector_end([float(number)] * size))
    seen: list[int] = []
    while owner.can_send(0.0):
        frame = take(owner)
        assert frame.ByteSize() < MAX_FRAME_BYTES + 4 * size + 1000
        assert len(frame.vectors) == len(frame.finished)
        seen += [entry.stream for entry in frame.vectors]
        owner.acknowledge(frame.frame, 0.0)
    assert sorted(seen) == list(range(1, 41))
    assert not owner.streams


def test_a_vector_that_comes_twice_is_delivered_once() -> None:
    owner = session()
    owner.record(open_stream(owner), vector_end([1.5]))
    frame = take(owner)
    mailbox = Mailbox(1, lambda: None)
    for _ in range(2):
        deliver(frame, {1: mailbox}, lambda number, error: None)
    (delta,) = asyncio.run(mailbox.take())
    assert delta.vector == [1.5]
    assert delta.finish_reason is FinishReason.STOP
    assert mailbox.ended


def test_an_end_for_a_reason_of_later_versions_fails_one_request_only() -> None:
    boxes = {number: Mailbox(1, on_end=lambda: None) for number in (1, 2)}
    frame = StepDeltas()
    frame.finished.add(stream=1, reason=99)  # type: ignore[arg-type]
    frame.finished.add(stream=2, reason=int(FinishReason.LENGTH))  # type: ignore[arg-type]
    failures: dict[int, PagewireError] = {}
    deliver(frame, boxes, failures.__setitem__)
    assert "99" in failures[1].message
    assert list(failures) == [1]
    assert boxes[2].ended
