"""Who wants no more of which answer."""

from __future__ import annotations

from pagewire_ui.stop_signals import StopSignals


def test_a_stop_counts_before_its_answer_begins_and_once() -> None:
    signals = StopSignals()
    signals.stop("me", "1")
    assert signals.begun("me", "1").is_set()
    signals.ended("me", "1")
    assert not signals.begun("me", "1").is_set()
    signals.stop("me", "1")
    assert signals.begun("me", "1").is_set()


def test_stops_of_what_has_ended_leave_room_for_others() -> None:
    signals = StopSignals()
    for number in range(10_000):
        signals.stop(f"gone {number}", "late")
    signals.stop("me", "1")
    assert signals.begun("me", "1").is_set()
    assert not signals.begun("gone 0", "late").is_set()


def test_a_question_that_was_overtaken_stops_itself_and_not_the_later_one() -> None:
    signals = StopSignals()
    first = signals.begun("me", "1")
    signals.stop_before("me", 3)
    third = signals.begun("me", "3")
    assert first.is_set()
    signals.stop_before("me", 2)
    assert signals.begun("me", "2").is_set()
    assert not third.is_set()
    signals.stop_all("me")
    assert third.is_set()
