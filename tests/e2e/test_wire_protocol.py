"""The engine's end of both wires over real sockets, spoken by hand."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import engine_pb2, sampling_pb2
from pagewire_engine import sessions
from tests.e2e.wire_peer import WirePeer, wait_until
from tests.fakes.fake_engine import VOCAB_SIZE, FakeEngine, fake_config


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(step_time_s=0.002) as running:
        yield running


@pytest.fixture
def never_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent again for being late."""
    monkeypatch.setattr(sessions, "ACK_TIMEOUT_S", 600.0)


@pytest.fixture
def peer(engine: FakeEngine) -> Iterator[WirePeer]:
    with WirePeer(engine.target) as speaking:
        yield speaking


def code(caught: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    return caught.value.code()


def read_to_end(peer: WirePeer, stream: int) -> tuple[list[int], list[int]]:
    """Tokens of a stream and its finish reasons, acknowledging as they come."""
    tokens: list[int] = []
    while True:
        deltas = peer.next("deltas")
        offset = 0
        for number, start, count in zip(deltas.stream, deltas.start, deltas.count, strict=True):
            if number == stream:
                assert start <= len(tokens)
                run = list(deltas.token_id[offset : offset + count])
                tokens += run[len(tokens) - start :]
            offset += count
        peer.ack(deltas.frame)
        reasons = [end.reason for end in deltas.finished if end.stream == stream]
        if reasons:
            return tokens, reasons


def test_submit_before_hello_is_refused(peer: WirePeer) -> None:
    peer.attach()
    with pytest.raises(grpc.RpcError) as caught:
        peer.submit("early", 1)
    assert code(caught) is grpc.StatusCode.FAILED_PRECONDITION
    assert "Hello" in caught.value.details()


def test_a_session_that_is_not_known_is_named(peer: WirePeer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        peer.submit("nobody", 1)
    assert code(caught) is grpc.StatusCode.NOT_FOUND


def test_tokens_come_after_hello_and_submit(peer: WirePeer) -> None:
    peer.greet()
    peer.submit("simple", 1, max_tokens=5)
    tokens, reasons = read_to_end(peer, 1)
    assert len(tokens) == 5
    assert reasons == [sampling_pb2.FINISH_REASON_LENGTH]


def test_the_same_submit_again_is_the_same_request(peer: WirePeer) -> None:
    peer.greet()
    first = peer.submit("twice", 1, temperature=1.0, max_tokens=2000)
    again = peer.submit("twice", 1, temperature=1.0, max_tokens=2000)
    assert first.seed == again.seed
    wait_until(lambda: peer.stats().num_running > 0, "it runs")
    stats = peer.stats()
    assert stats.num_running + stats.num_waiting == 1
    peer.abort("twice")


def test_a_second_live_request_of_one_id_is_refused(peer: WirePeer, engine: FakeEngine) -> None:
    peer.greet()
    peer.submit("double", 1, max_tokens=2000)
    with pytest.raises(grpc.RpcError) as caught:
        peer.submit("double", 2)
    assert code(caught) is grpc.StatusCode.ALREADY_EXISTS
    with WirePeer(engine.target) as other:
        other.greet()
        with pytest.raises(grpc.RpcError) as caught:
            other.submit("double", 1)
        assert code(caught) is grpc.StatusCode.ALREADY_EXISTS
    peer.abort("double")


def test_an_id_is_free_again_at_once_after_its_abort(peer: WirePeer) -> None:
    peer.greet()
    peer.submit("again", 1, max_tokens=2000)
    peer.abort("again")
    peer.submit("again", 2, max_tokens=6)
    tokens, reasons = read_to_end(peer, 2)
    assert (len(tokens), reasons) == (6, [sampling_pb2.FINISH_REASON_LENGTH])


def test_a_stream_number_is_never_used_twice(peer: WirePeer) -> None:
    peer.greet()
    peer.submit("one", 1, max_tokens=1)
    read_to_end(peer, 1)
    with pytest.raises(grpc.RpcError) as caught:
        peer.submit("two", 1)
    assert code(caught) is grpc.StatusCode.INVALID_ARGUMENT


def test_without_acknowledgement_at_most_eight_frames_come_and_the_rest_coalesces(
    peer: WirePeer, never_overdue: None
) -> None:
    peer.greet()
    peer.submit("slow", 1, max_tokens=60)
    frames = [peer.next("deltas") for _ in range(8)]
    wait_until(lambda: peer.stats().num_running == 0, "the request ends although nobody reads")
    peer.ack(frames[-1].frame)
    last = peer.next("deltas")
    assert list(last.count) == [60 - sum(sum(frame.count) for frame in frames)]
    assert len(last.finished) == 1


def test_unacknowledged_frames_are_sent_again_when_overdue(peer: WirePeer) -> None:
    peer.greet()
    peer.submit("overdue", 1, max_tokens=3)
    wait_until(lambda: peer.stats().num_running == 0, "the request ends")
    seen = peer.next("deltas")
    while seen.base_frame == 1:
        seen = peer.next("deltas")
    assert (list(seen.start), list(seen.count)) == ([0], [3])
    assert seen.frame == seen.base_frame


def test_resume_sends_what_was_not_acknowledged_again(peer: WirePeer, never_overdue: None) -> None:
    peer.greet()
    peer.submit("resumed", 1, max_tokens=4)
    wait_until(lambda: peer.stats().num_running == 0, "the request ends")
    peer.next("deltas")
    peer.stub.Resume(engine_pb2.ResumeRequest(session_id=peer.attached.session_id), timeout=30)
    again = peer.next("deltas")
    while again.base_frame == 1:
        again = peer.next("deltas")
    assert (list(again.start), list(again.count)) == ([0], [4])


def test_a_complaint_rewinds_at_once(peer: WirePeer, never_overdue: None) -> None:
    peer.greet()
    peer.submit("gap", 1, max_tokens=4)
    wait_until(lambda: peer.stats().num_running == 0, "the request ends")
    peer.next("deltas")
    peer.ack(0, rewind=True)
    again = peer.next("deltas")
    while again.base_frame == 1:
        again = peer.next("deltas")
    assert list(again.start) == [0]


@pytest.mark.parametrize("astray", [{"session_id": "f" * 32}, {"epoch": 5}], ids=str)
def test_an_acknowledgement_gone_astray_acknowledges_nothing_and_ends_nothing(
    peer: WirePeer, never_overdue: None, astray: dict[str, Any]
) -> None:
    peer.greet()
    peer.submit("astray", 1, max_tokens=4)
    wait_until(lambda: peer.stats().num_running == 0, "the request ends")
    frame = peer.next("deltas").frame
    before = peer.stats().delta_wire
    peer.ack(frame, **astray)

    def dropped() -> int:
        now = peer.stats().delta_wire
        return (
            now.num_other_session
            + now.num_old_epoch
            - before.num_other_session
            - before.num_old_epoch
        )

    wait_until(lambda: dropped() == 1, "it is dropped")
    # Nothing was forgotten for it, and the connection lasts.
    peer.ack(0, rewind=True)
    again = peer.next("deltas")
    while again.base_frame == 1:
        again = peer.next("deltas")
    assert list(again.start) == [0]


def test_the_secret_takes_a_session_over_with_its_streams(peer: WirePeer) -> None:
    peer.greet()
    peer.submit("taken", 1, max_tokens=5)
    wait_until(lambda: peer.stats().num_running == 0, "the request ends")
    before = peer.attached
    taken = peer.attach(session_id=before.session_id, secret=before.secret)
    assert taken.resumed
    assert taken.session_id == before.session_id
    peer.connect()
    peer.hello()
    peer.next("hello_reply")
    tokens, _ = read_to_end(peer, 1)
    assert len(tokens) == 5


@pytest.mark.parametrize("guess", ["guess", "gu\N{LATIN SMALL LETTER E WITH DIAERESIS}ss"])
def test_a_wrong_secret_takes_nothing_over(peer: WirePeer, guess: str) -> None:
    peer.greet()
    with pytest.raises(grpc.RpcError) as caught:
        peer.attach(session_id=peer.attached.session_id, secret=guess)
    assert code(caught) is grpc.StatusCode.UNAUTHENTICATED
    peer.connect()
    peer.hello(secret=guess)
    assert "secret" in peer.next("goodbye").reason


def test_an_old_epoch_or_an_unknown_session_is_told_goodbye(peer: WirePeer) -> None:
    peer.attach()
    peer.connect()
    peer.hello(epoch=peer.attached.epoch - 1)
    peer.next("goodbye")
    peer.hello(session_id="nobody")
    peer.next("goodbye")
    peer.ack(3)
    peer.next("goodbye")


def test_heartbeats_tell_the_step_and_whether_it_is_being_computed(peer: WirePeer) -> None:
    peer.greet()
    idle = peer.next("heartbeat")
    assert (idle.epoch, idle.busy) == (peer.attached.epoch, False)
    peer.submit("busy", 1, max_tokens=3000)
    later = peer.next("heartbeat")
    while later.step == idle.step:  # those before it was submitted
        later = peer.next("heartbeat")
    assert later.step > idle.step
    peer.abort("busy")


def test_garbage_on_the_delta_wire_is_ignored_and_nothing_is_unpickled(
    peer: WirePeer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer.greet()
    trap = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (trap,)  # type: ignore[return-value]  # a pickle may name anything

    assert peer.socket is not None
    for index in range(200):
        peer.socket.send(pickle.dumps(Trap()))
        peer.socket.send(bytes([index, 255, 255, 255, 7]))
        peer.socket.send(b"")
        peer.socket.send_multipart([b"a", b"b", b"c"])
    peer.submit("after-garbage", 1, max_tokens=4)
    assert len(read_to_end(peer, 1)[0]) == 4
    assert not trap.exists()
    warnings = [record for record in caplog.records if "no frame" in record.getMessage()]
    assert len(warnings) <= 2


def test_random_bytes_on_the_tcp_sockets_hurt_nobody() -> None:
    config = fake_config(stream_endpoint="tcp://127.0.0.1:*")
    with FakeEngine(config) as engine, WirePeer(engine.target) as peer:
        peer.greet()
        wire_port = int(peer.attached.stream_endpoint.rpartition(":")[2])
        for port in (wire_port, engine.port):
            for data in (b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
                with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
                    stranger.sendall(data)
        peer.submit("after-bytes", 1, max_tokens=4)
        assert len(read_to_end(peer, 1)[0]) == 4


def test_beyond_loopback_the_wire_is_encrypted_with_the_key_of_attach() -> None:
    with FakeEngine(fake_config(host="0.0.0.0")) as engine, WirePeer(engine.target) as peer:
        peer.greet()
        assert len(peer.attached.curve_server_key) > 0
        assert peer.attached.stream_endpoint.startswith("tcp://*:")
        peer.submit("secret", 1, max_tokens=4)
        assert len(read_to_end(peer, 1)[0]) == 4
        # Without the key nothing is even heard.
        peer.attached.ClearField("curve_server_key")
        peer.connect()
        peer.hello()
        with pytest.raises(TimeoutError):
            peer.next("hello_reply", timeout_s=0.5)


def test_a_body_of_100_mb_is_refused_and_the_engine_lives(peer: WirePeer) -> None:
    peer.greet()
    with pytest.raises(grpc.RpcError) as caught:
        peer.stub.Submit(
            engine_pb2.SubmitRequest(
                session_id=peer.attached.session_id, request_id="x" * 100_000_000
            ),
            timeout=30,
        )
    assert code(caught) is grpc.StatusCode.RESOURCE_EXHAUSTED
    peer.submit("after-body", 1, max_tokens=2)
    assert len(read_to_end(peer, 1)[0]) == 2


def test_a_bad_field_comes_with_its_name_in_the_details(peer: WirePeer) -> None:
    peer.greet()
    with pytest.raises(grpc.RpcError) as caught:
        peer.submit("bad", 1, stop_token_ids=[VOCAB_SIZE])
    status = rpc_status.from_call(caught.value)
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "stop_token_ids"
    assert code(caught) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_full_queue_says_when_to_come_back() -> None:
    config = fake_config(max_waiting_requests=1, max_num_seqs=1)
    with FakeEngine(config, step_time_s=0.05) as engine, WirePeer(engine.target) as peer:
        peer.greet()
        peer.submit("running", 1, max_tokens=1000)
        wait_until(lambda: peer.stats().num_running == 1, "the first one runs")
        peer.submit("waiting", 2, max_tokens=1000)
        wait_until(lambda: peer.stats().num_waiting == 1, "the second one waits")
        with pytest.raises(grpc.RpcError) as caught:
            peer.submit("too-many", 3)
        assert code(caught) is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(caught.value).details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0


def test_a_draining_engine_takes_nothing_new_and_gives_back_what_is_left() -> None:
    with FakeEngine(step_time_s=0.01) as engine, WirePeer(engine.target) as peer:
        peer.greet()
        peer.submit("long", 1, max_tokens=3000)
        drained = peer.stub.Drain(engine_pb2.DrainRequest(timeout_s=0.1), timeout=30)
        assert drained.unfinished == 1
        with pytest.raises(grpc.RpcError) as caught:
            peer.submit("late", 2)
        assert code(caught) is grpc.StatusCode.UNAVAILABLE
        deltas = peer.next("deltas")
        while not deltas.failed:
            peer.ack(deltas.frame)
            deltas = peer.next("deltas")
        assert deltas.failed[0].code == grpc.StatusCode.UNAVAILABLE.value[0]


def test_an_abort_that_comes_late_spares_what_was_submitted_again(peer: WirePeer) -> None:
    peer.greet()
    peer.submit("r", 1, max_tokens=4000)
    peer.abort("r", stream=1)
    peer.submit("r", 2, max_tokens=8)
    peer.abort("r", stream=1)
    ends: dict[int, int] = {}
    while 2 not in ends:
        deltas = peer.next("deltas")
        peer.ack(deltas.frame)
        ends |= {end.stream: end.num_tokens for end in deltas.finished}
    assert ends[2] == 8


def test_an_abort_that_overtakes_its_submit_holds(peer: WirePeer) -> None:
    peer.greet()
    peer.abort("r", stream=1)
    with pytest.raises(grpc.RpcError) as caught:
        peer.submit("r", 1)
    assert code(caught) is grpc.StatusCode.INVALID_ARGUMENT
    peer.submit("r", 2)
