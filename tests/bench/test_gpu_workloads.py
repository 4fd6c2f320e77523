"""The GPU benchmark runs the peers' own workloads, and its arithmetic is right."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.bench.gpu import __main__ as gpu_bench
from tests.bench.gpu.profiling import summarize
from tests.bench.gpu.report import Report
from tests.bench.gpu.serving_clients import summary
from tests.bench.gpu.tokenizer import write_tokenizer
from tests.bench.gpu.workloads import FULL, MODELS, fixed, min_decode_bytes, mixed

_PEERS = Path(__file__).resolve().parents[3] / "shared" / "peers" / "gpu"


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    """The peers' workloads."""
    file = _PEERS / "workloads.py"
    if not file.exists():
        pytest.skip("the peers' workloads are not on this machine")
    spec = importlib.util.spec_from_file_location("peer_workloads", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_workloads_are_the_peers_own(peer: ModuleType) -> None:
    assert mixed(FULL) == peer.mixed()
    assert fixed(FULL, 8, 128, 108) == peer.fixed(8, 128, 108)


@pytest.mark.parametrize("name", ["1b", "8b"])
def test_the_models_are_the_peers_own(name: str, peer: ModuleType) -> None:
    config = MODELS[name].config()
    assert config == json.loads((_PEERS / "cfg" / f"llama{name}" / "config.json").read_text())
    for batch in FULL.decode_batches:
        assert min_decode_bytes(config, batch, 256) == peer.min_decode_bytes(name, batch, 256)


def test_the_mixed_requests_are_those_that_the_peers_results_count() -> None:
    prompts, lengths = mixed(FULL)
    assert (len(prompts), sum(map(len, prompts)), sum(lengths)) == (512, 142_941, 74_161)
    assert all(10 <= token_id < 128_000 for prompt in prompts for token_id in prompt)


def test_every_token_of_the_made_up_tokenizer_is_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 2_000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2_000
    words = [tokenizer.decode([token_id]) for token_id in range(256, 2_000)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(" ") for word in words)


def _line(report: Report, model: str, test: str, **values: Any) -> dict[str, Any]:
    return report.add(model, {"test": test, **values})


def test_lines_have_the_peers_keys_and_are_set_against_one_another() -> None:
    report = Report({"commit": "abc"})
    line = _line(report, "8b", "start", startup_s=20.0, card="H100")
    assert list(line)[:10] == [
        *("engine", "model", "test", "batch", "out_tok_s", "ms_per_step", "prefill_tok_s"),
        *("startup_s", "card", "commit"),
    ]
    assert (line["engine"], line["commit"], line["out_tok_s"]) == ("pagewire", "abc", None)
    _line(report, "8b", "A", out_tok_s=10_000.0)
    _line(report, "8b", "A64", batch=64, out_tok_s=8_000.0)
    assert _line(report, "8b", "F", out_tok_s=9_800.0)["of_greedy"] == 0.98
    assert _line(report, "8b", "server", batch=64, out_tok_s=6_000.0)["of_offline"] == 0.75
    served = _line(report, "8b", "server", batch=256, out_tok_s=9_500.0)
    assert served["of_offline"] == 0.95
    assert served["card"] == "H100"
    report.add(None, {"test": "copy", "TB_s": 2.5})
    step = _line(report, "8b", "B", batch=8, ms_per_step=7.2, min_GB_per_step=15.0)
    assert (step["floor_ms"], step["over_floor"]) == (6.0, 1.2)


def test_the_table_tells_what_was_reached() -> None:
    report = Report({})
    _line(report, "8b", "A", out_tok_s=9_000.0)
    _line(report, "8b", "B", batch=1, ms_per_step=5.2)
    _line(report, "8b", "B", batch=64, ms_per_step=7.4)
    _line(report, "1b", "A", error="out of memory")
    rows = [" ".join(row.split()) for row in report.table().splitlines()]
    assert rows == [
        "model test got must aim vLLM",
        "8b A out_tok_s 9,000 8,600 10,000 8,561 ok",
        "8b B 1 ms_per_step 5.2 5.9 5.3 6.493 aim",
        "8b B 64 ms_per_step 7.4 7.3 6.5 7.782 MISSED",
    ]


def _event(category: str, name: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}


def test_a_recording_tells_busy_time_gaps_and_the_longest_kernels() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        _event("kernel", "gemm", 100.0, 30.0),
        _event("kernel", "norm", 120.0, 20.0),  # on another stream
        _event("gpu_memcpy", "copy", 150.0, 10.0),
        _event("kernel", "gemm", 180.0, 20.0),
        _event("cuda_runtime", "cudaGraphLaunch", 90.0, 8.0),
    ]
    found = summarize(events, 2)
    assert found.ms_per_step == 0.05
    assert found.busy == 0.7
    assert found.kernels_per_step == 2
    assert found.longest_gap_us == 20
    assert found.kernels == [("gemm", 25.0, 1.0), ("norm", 10.0, 0.5), ("copy", 5.0, 0.5)]
    assert found.host_calls == [("cudaGraphLaunch", 4.0, 0.5)]


def test_an_answer_of_another_length_is_no_result() -> None:
    with pytest.raises(AssertionError, match="request 0: 0 tokens"):
        summary([3], [(0, 1.0, [(2.0, b"")])])


def test_settings_and_rounds_are_checked() -> None:
    assert gpu_bench.parse_arguments(["--quick"]).rounds == 1
    assert gpu_bench.parse_arguments([]).rounds == 3
    with pytest.raises(SystemExit, match="must be NAME=VALUE"):
        gpu_bench.parse_arguments(["--setting", "attention_backend"])


def _lines_here(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The programs' lines, made in this process: torch is here already."""
    name, *rest = arguments
    module = importlib.import_module(name)
    return module.results(*rest) if name.endswith("ceilings") else module.results(rest)


@pytest.mark.slow
def test_it_runs_on_a_cpu(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the numerics, which are tests of their own."""
    monkeypatch.setattr(gpu_bench, "lines_of", _lines_here)
    out = tmp_path / "lines.jsonl"
    tests = ["ceilings", "A", "B", "C", "F", "server", "submits"]
    status = gpu_bench.main(
        [
            *("--device", "cpu", "--models", "tiny", "--quick", "--clients", "2", "8"),
            *("--setting", "seed=1", "--out", str(out), "--tests", *tests),
        ]
    )
    printed = capfd.readouterr()
    assert status == 0, printed.out
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["test"], line["batch"]) for line in lines] == [
        *(("copy", None), ("matmul", None), ("start", None), ("A", None), ("B", 1), ("B", 4)),
        *(("C", 2), ("F", None), ("A2", 2), ("server start", None), ("server", 2), ("server", 8)),
        ("submits", 8),
    ]
    assert all(line["settings"] == ["seed=1"] and line["quick"] for line in lines)
    by_test = {(line["test"], line["batch"]): line for line in lines}
    assert by_test["A", None]["output_tokens"] == sum(mixed(MODELS["tiny"].scale)[1])
    assert by_test["server", 8]["of_offline"] > 0
    assert by_test["submits", 8]["p99_ratio"] > 0


def test_a_program_that_fails_is_told_and_the_others_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
        if arguments[1] == "1b":
            yield {"test": "start", "card": "H100"}
            raise RuntimeError("ended with status 1")
        yield {"test": "A", "out_tok_s": 9_000.0}

    monkeypatch.setattr(gpu_bench, "lines_of", lines)
    assert gpu_bench.main(["--models", "1b", "8b", "--tests", "A"]) == 1
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(line["model"], line["test"], line.get("error")) for line in told] == [
        ("1b", "start", None),
        ("1b", "offline", "ended with status 1"),
        ("8b", "A", None),
    ]
