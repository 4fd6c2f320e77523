"""What torch is told of threads before it is imported."""

from __future__ import annotations

import os

import pytest

from pagewire_engine.build import limit_threads


@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_torchs_threads_sleep_between_loops_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, policy: str
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "7")  # put back afterwards
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    limit_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["OMP_WAIT_POLICY"] == policy
