"""The wire benchmark in small: engine, frontend and client in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.wire import run_paced

pytestmark = pytest.mark.slow


def test_nothing_is_lost_or_repeated_from_the_engines_step_to_the_clients_message(
    smollm2_path: Path,
) -> None:
    # It checks every token itself; how fast they come is the benchmark's business.
    result = run_paced(streams=8, tokens_per_s=800, seconds=2.0, tokenizer=smollm2_path)
    assert result["tokens"] == 8 * 200
    assert 1.0 <= result["tokens_per_message_mean"] < 20
