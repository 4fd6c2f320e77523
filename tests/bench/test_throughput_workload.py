"""The throughput benchmark's workload is the peers' own, and its arithmetic is right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.engine_llama_cpp import _packed
from tests.bench.throughput import (
    Measurement,
    engine_specs,
    flag_slow_rounds,
    parse_arguments,
    ratios,
)
from tests.bench.workloads import cpu_prompts, pydoc_prompts, some_prompts

_PEERS = Path(__file__).resolve().parents[3] / "shared" / "peers" / "cpu" / "prompts.json"
_VOCAB_SIZE = 49_152


def test_the_shipped_prompts_are_as_described() -> None:
    prompts = cpu_prompts()
    assert [len(ids) for ids in prompts] == [64 + round(i * 192 / 31) for i in range(32)]
    assert all(0 <= token_id < _VOCAB_SIZE for ids in prompts for token_id in ids)


@pytest.mark.skipif(not _PEERS.exists(), reason="the peers' prompts are not on this machine")
def test_the_shipped_prompts_are_the_peers_own() -> None:
    assert cpu_prompts() == json.loads(_PEERS.read_text())


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pydoc differs by Python version")
def test_the_recipe_makes_the_shipped_prompts(smollm2_path: Path) -> None:
    from tokenizers import Tokenizer

    from pagewire_engine.tokenizer_files import load_tokenizer_files

    files = load_tokenizer_files(smollm2_path.parent, smollm2_path, mode="auto")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    made = pydoc_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    assert made == cpu_prompts()


def test_some_prompts_spread_over_the_lengths() -> None:
    assert [len(ids) for ids in some_prompts(4)] == [64, 114, 163, 213]
    assert some_prompts(32) == cpu_prompts()


def _measured(engine: str, turn: int, rate: float, gflops: float) -> Measurement:
    return Measurement(engine, "t", 32, turn, rate, 1.0, 1.0, 1.0, 1.0, (gflops, gflops))


def test_ratios_pair_rounds_and_leave_slow_ones_out() -> None:
    rounds = [
        _measured("pagewire", 0, 200.0, 300.0),
        _measured("peer", 0, 100.0, 299.0),
        _measured("pagewire", 1, 90.0, 150.0),
        _measured("peer", 1, 100.0, 300.0),
        _measured("pagewire", 2, 330.0, 290.0),
        _measured("peer", 2, 110.0, 300.0),
    ]
    flagged = flag_slow_rounds(rounds, 0.8)
    assert [m.quiet for m in flagged] == [True, True, False, True, True, True]
    assert ratios(flagged) == [
        {"ratio": "pagewire / peer", "batch": 32, "median": 2.5, "rounds": 2}
    ]
    assert not flag_slow_rounds([replace(rounds[0])], 310.0)[0].quiet


def test_each_kind_of_weights_is_set_against_each_peer() -> None:
    rounds = [
        _measured("pagewire", 0, 100.0, 300.0),
        _measured("pagewire-int8", 0, 300.0, 300.0),
        _measured("llama.cpp-Q8_0", 0, 150.0, 300.0),
    ]
    assert [(ratio["ratio"], ratio["median"]) for ratio in ratios(rounds)] == [
        ("pagewire / llama.cpp-Q8_0", 0.667),
        ("pagewire-int8 / llama.cpp-Q8_0", 2.0),
    ]


def test_one_run_measures_every_kind_of_weights_and_llama_cpp() -> None:
    arguments = parse_arguments(
        [
            "--batches",
            "1",
            "8",
            "32",
            "--no-peers",
            "--weights",
            "float32",
            "bfloat16",
            "int8",
            "--llama-python",
            "py",
        ]
    )
    specs = {spec.name: spec for spec in engine_specs(arguments, "model.gguf")}
    assert list(specs) == [
        "pagewire",
        "pagewire-bfloat16",
        "pagewire-int8",
        "llama.cpp-Q8_0",
        "llama.cpp-BF16",
    ]
    assert specs["pagewire-int8"].command[-2:] == ["model.gguf", "quantization=int8"]
    assert all(spec.batches == [1, 8, 32] for spec in specs.values())


def test_prompts_are_packed_in_turn_up_to_what_llama_cpp_takes_at_once() -> None:
    assert _packed([2000, 48, 1, 2048, 5]) == [[0, 1], [2], [3], [4]]
