"""Rates and times over the last minutes, out of counters that only grow."""

from __future__ import annotations

import sys

import hypothesis.strategies as st
from hypothesis import example, given

from pagewire.v1 import engine_pb2
from pagewire_ui import engine_charts
from pagewire_ui.engine_history import (
    MAX_MOMENTS,
    EngineHistory,
    Moment,
    counts,
    first_token_s,
    generated_per_s,
)


def moment(at_s: float, generated: int = 0, *, epoch: int = 1, firsts: int = 0) -> Moment:
    stats = engine_pb2.GetStatsResponse(epoch=epoch, num_generation_tokens=generated)
    stats.time_to_first_token.counts.append(firsts)
    stats.time_to_first_token.sum = 0.5 * firsts
    return Moment.of(stats, at_s)


def test_a_rate_is_the_growth_over_its_time() -> None:
    assert generated_per_s([moment(0.0, 100), moment(2.0, 180)]) == [(0.0, 40.0)]


def test_nothing_is_drawn_over_a_restart_or_a_time_that_nobody_looked() -> None:
    assert generated_per_s([moment(0, 100), moment(1, 5, epoch=2)]) == [None]
    assert generated_per_s([moment(0, 100), moment(60, 700)]) == [None]


def test_the_time_to_the_first_token_is_that_of_new_requests() -> None:
    seen = [moment(0, firsts=4), moment(1, firsts=6), moment(2, firsts=6)]
    assert first_token_s(seen) == [(1.0, 0.5), None]


def test_the_history_is_bounded() -> None:
    history = EngineHistory()
    for second in range(MAX_MOMENTS + 50):
        history.add(moment(second))
    assert len(history.moments()) == MAX_MOMENTS


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.integers(0, 2**63),
            st.integers(0, 2),
            st.integers(0, 1000),
        ),
        max_size=20,
    )
)
@example([(0.0, 0, 0, 0), (sys.float_info.min, 3, 0, 0)])
def test_whatever_the_counters_do_it_is_drawn_within_the_picture(
    steps: list[tuple[float, int, int, int]],
) -> None:
    at_s, moments = 0.0, []
    for pause_s, generated, epoch, firsts in steps:
        at_s += pause_s
        moments.append(moment(at_s, generated, epoch=epoch, firsts=firsts))
    drawn = engine_charts.draw(moments)
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert bool(drawn) == (len(moments) > 1)


def test_no_line_of_counts_is_drawn_over_a_time_in_which_nobody_looked() -> None:
    series = counts([moment(at_s) for at_s in (0.0, 1.0, 60.0, 61.0)], "num_running")
    assert [point is None for point in series] == [False, False, True, False, False]
