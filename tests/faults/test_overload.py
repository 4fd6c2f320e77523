"""Ten times what the engine can do: `tests/bench/overload.py` in small."""

from __future__ import annotations

import pytest

from tests.bench.overload import run_overload

pytestmark = pytest.mark.slow


def test_who_is_admitted_is_answered_in_time_and_the_rest_is_refused_at_once() -> None:
    seen = run_overload(seconds=6.0)
    assert seen["other_ends"] == {}
    # A queue of a second's work is full all the while, so that nine of ten find no place.
    assert seen["refused"] > seen["offered"] / 2
    assert seen["admitted"] > 10
    assert seen["in_deadline_share"] > 0.95
    assert seen["refused_without_hint"] == 0
    assert seen["refusal_ms_median"] < 1000 * seen["answered_s_median"] / 2
    for name, before in seen["rss_mb_before"].items():
        assert seen["rss_mb_after"][name] < before + 24, (name, seen)
