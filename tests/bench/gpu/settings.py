"""The settings that every engine is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.bench.gpu.workloads import BenchModel


def engine_settings(model: BenchModel, device: str, given: dict[str, str]) -> dict[str, Any]:
    """The settings of the engine under test: those that the peers had, and what was asked for."""
    return {
        "model": str(model.folder),
        "device": device,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        **model.scale.settings,
        **given,
    }


def parsed_settings(pairs: Sequence[str]) -> dict[str, str]:
    """`name=value` arguments; the engine's config reads the values."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise SystemExit(f"--setting {wrong[0]}: must be NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)
