"""A histogram counts each value in the bucket that Prometheus would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from pagewire.histogram import Histogram

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 0.7, 1.0, 3.9, 4.0, 9.0]), st.integers(1, 3))))
def test_buckets_are_those_of_prometheus(values: list[tuple[float, int]]) -> None:
    registry = CollectorRegistry()
    wanted = PrometheusHistogram("x", "", buckets=BOUNDS, registry=registry)
    histogram = Histogram(BOUNDS)
    for value, times in values:
        histogram.observe(value, times)
        for _ in range(times):
            wanted.observe(value)
    counts = histogram.snapshot()
    cumulative = 0
    for bound, count in zip((*BOUNDS, "+Inf"), counts.counts, strict=True):
        cumulative += count
        assert registry.get_sample_value("x_bucket", {"le": str(bound)}) == cumulative
    assert registry.get_sample_value("x_sum") == pytest.approx(counts.sum)


def test_a_snapshot_stays_as_it_was() -> None:
    histogram = Histogram(BOUNDS)
    before = histogram.snapshot()
    histogram.observe(1.0)
    assert sum(before.counts) == 0
