"""A request's times are whole, whoever ended it."""

from __future__ import annotations

from pagewire.outputs import RequestTimes
from pagewire_frontend.phase_times import PhaseTimes

FIRST = RequestTimes(queue_s=1.0, prefill_s=2.0, cached_tokens=3, steps=4, step_s=1.5)
END = RequestTimes(1.0, 2.0, decode_s=5.0, cached_tokens=3, preemptions=1, steps=9, step_s=6.0)


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_engine_s_word_on_the_end_counts() -> None:
    times = PhaseTimes(Clock())
    times.take(FIRST, is_end=False)
    times.take(END, is_end=True)
    assert times.final(num_tokens=6, ended_here=False) == END


def test_an_end_by_a_stop_string_is_timed_here_from_the_first_token_on() -> None:
    clock = Clock()
    times = PhaseTimes(clock)
    times.take(FIRST, is_end=False)
    clock.now += 4.0
    assert times.final(num_tokens=6, ended_here=True) == RequestTimes(
        queue_s=1.0, prefill_s=2.0, decode_s=4.0, cached_tokens=3, steps=9, step_s=5.5
    )


def test_of_two_sequences_the_one_that_ends_last_says_how_long_decoding_took() -> None:
    clock = Clock()
    times = PhaseTimes(clock)
    times.take(FIRST, is_end=False)
    times.take(END, is_end=True)
    clock.now += 8.0
    final = times.final(num_tokens=6, ended_here=True)
    assert (final.decode_s, final.preemptions) == (8.0, 1)


def test_a_request_that_was_told_nothing_has_no_times() -> None:
    assert PhaseTimes(Clock()).final(num_tokens=0, ended_here=True) == RequestTimes()
