"""Thread counts follow the affinity mask, the container's quota and what was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagewire_engine.cpus import available_cpus, model_threads


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("nonsense", 64), (None, 64)],
)
def test_a_quota_bounds_the_cpus(
    quota: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert available_cpus(tmp_path) == cpus


def test_what_was_asked_for_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert model_threads(5) == 5
    assert model_threads(None) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert model_threads(None) == available_cpus()
