"""The receiver's frame numbers."""

from __future__ import annotations

from pagewire_frontend.engine_client.frame_order import FrameOrder, Verdict


def verdicts(*frames: tuple[int, int]) -> list[str]:
    order = FrameOrder()
    return [order.admit(frame, base).name for frame, base in frames]


def test_frames_in_order_are_accepted_and_repetitions_dropped() -> None:
    assert verdicts((1, 1), (2, 1), (2, 1), (1, 1)) == [
        "ACCEPT",
        "ACCEPT",
        "DUPLICATE",
        "DUPLICATE",
    ]


def test_a_missing_frame_is_a_gap_until_it_is_sent_again() -> None:
    assert verdicts((1, 1), (3, 1), (4, 1), (2, 1)) == ["ACCEPT", "GAP", "GAP", "ACCEPT"]


def test_a_receiver_jumps_to_the_base_of_a_rewind() -> None:
    order = FrameOrder()
    assert order.admit(1, 1) is Verdict.ACCEPT
    assert order.admit(5, 5) is Verdict.ACCEPT
    assert order.acknowledgeable == 5


def test_a_gap_behind_a_rewind_is_told_by_its_number() -> None:
    order = FrameOrder()
    assert order.admit(6, 5) is Verdict.GAP
    assert order.acknowledgeable == 4
    assert order.admit(5, 5) is Verdict.ACCEPT
