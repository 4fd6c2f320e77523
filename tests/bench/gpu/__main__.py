"""The GPU benchmark: numerics, the card's ceilings, and the workloads, offline and served.

    python -m tests.bench.gpu                                    everything, 8B and 1B shapes
    python -m tests.bench.gpu --models 1b --tests B              one workload of one model
    python -m tests.bench.gpu --models 8b --tests A B --profile  and where its steps' time goes
    python -m tests.bench.gpu --device cpu --models tiny         that the benchmark works

Prints a line of JSON for each result, on standard error what the programs under test log, and at
the end a table of what was reached of what is asked for. Weights are random (load_format dummy);
figures are medians of `--rounds`. Tests: numerics, ceilings, A (mixed requests, greedy), B
(decode), C (prefill), F (A sampled), server (A through gRPC streams), submits (step times under 50
Submits a second). A model runs in a process of its own, from whose start `startup_s` counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench.gpu.lines import ROOT, Line, failure, lines_of
from tests.bench.gpu.report import Report, commit
from tests.bench.gpu.settings import parsed_settings
from tests.bench.gpu.workloads import MODELS

_OFFLINE = ("A", "B", "C", "F")
_TESTS = ("numerics", "ceilings", *_OFFLINE, "server", "submits")
# Without the real model: not every GPU machine can fetch it. A later -k counts instead.
_NUMERICS = ("tests/gpu", "-k", "not the_real_model")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8b", "1b"])
    parser.add_argument("--tests", nargs="+", choices=_TESTS, default=list(_TESTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, help="runs of each figure; default 3, or 1 if quick")
    parser.add_argument(
        "--quick", action="store_true", help="less warm-up and fewer rounds: figures not to quote"
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[64, 256], help="of server")
    parser.add_argument("--workers", type=int, default=1, help="frontends of server")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the engine, such as attention_backend=torch; may be given several times",
    )
    parser.add_argument(
        "--profile", action="store_true", help="record steps of each model, and show their kernels"
    )
    parser.add_argument(
        "--numerics-args", default="", help="more arguments of pytest, such as '-k triton'"
    )
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    chosen = parser.parse_args(arguments)
    parsed_settings(chosen.setting)
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 3)
    return chosen


class Benchmark:
    """Runs what was chosen; one test's failure leaves the others be."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self._arguments = arguments
        self._report = report
        self.failures = 0

    def run(self) -> None:
        tests = self._arguments.tests
        if "numerics" in tests:
            self._attempt(None, "numerics", self._numerics)
        if "ceilings" in tests:
            device = self._arguments.device
            self._attempt(None, "ceilings", lambda: lines_of(["tests.bench.gpu.ceilings", device]))
        for model in self._arguments.models:
            if self._arguments.profile or set(tests) & {*_OFFLINE, "server"}:
                self._attempt(model, "offline", lambda name=model: self._offline(name))
            if {"server", "submits"} & set(tests):
                self._attempt(model, "server", lambda name=model: self._served(name))

    def _attempt(self, model: str | None, test: str, run: Callable[[], Iterator[Line]]) -> None:
        try:
            for line in run():
                self._print(model, line)
        except Exception as error:
            self._print(model, failure(test, error))

    def _print(self, model: str | None, line: Line) -> None:
        text = line.pop("text", None)
        if text is not None:
            print(text, file=sys.stderr, flush=True)
        self.failures += "error" in line
        shown = json.dumps(self._report.add(model, line))
        print(shown, flush=True)
        if self._arguments.out is not None:
            with self._arguments.out.open("a") as file:
                file.write(shown + "\n")

    def _numerics(self) -> Iterator[Line]:
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", *_NUMERICS]
        told = subprocess.run(
            [*command, *self._arguments.numerics_args.split()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(told.stdout, file=sys.stderr, flush=True)
        last = told.stdout.strip().splitlines()[-1:]
        line: Line = {"test": "numerics", "seconds": round(time.monotonic() - began, 1)}
        if told.returncode:
            line["error"] = f"pytest ended with status {told.returncode}"
        yield line | {"result": "".join(last)}

    def _offline(self, model: str) -> Iterator[Line]:
        arguments = self._arguments
        tests = [test for test in _OFFLINE if test in arguments.tests]
        most = MODELS[model].scale.settings["max_num_seqs"]
        # What a server of few clients is set against; as many as the engine takes are A itself.
        in_flight = [n for n in arguments.clients if "server" in arguments.tests and n < most]
        if "server" in arguments.tests:
            tests = [*dict.fromkeys(["A", *tests]), *(f"A{count}" for count in in_flight)]
        began = time.monotonic()
        for line in lines_of(
            [
                *("tests.bench.gpu.offline", model, arguments.device),
                *("--rounds", str(arguments.rounds), "--tests", *tests),
                *("--in-flight", *map(str, in_flight)),
                *(["--quick"] if arguments.quick else []),
                *(["--profile"] if arguments.profile else []),
                *(part for pair in arguments.setting for part in ("--setting", pair)),
            ]
        ):
            if line["test"] == "start":
                line["startup_s"] = round(time.monotonic() - began, 2)
            yield line

    def _served(self, model: str) -> Iterator[Line]:
        # Here, for it brings the frontend along.
        from tests.bench.gpu import serving

        arguments, shape = self._arguments, MODELS[model]
        given = parsed_settings(arguments.setting)
        with serving.running_engine(shape, arguments.device, given) as (engine, port, seconds):
            yield {"test": "server start", "startup_s": round(seconds, 2)}
            if "server" in arguments.tests:
                yield from serving.run_server(
                    shape,
                    port,
                    arguments.clients,
                    workers=arguments.workers,
                    rounds=arguments.rounds,
                    quick=arguments.quick,
                )
            if "submits" in arguments.tests:
                streams = int(given.get("max_num_seqs", shape.scale.settings["max_num_seqs"]))
                yield serving.run_submits(shape, engine, port, streams, arguments.quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 where a test has failed."""
    arguments = parse_arguments(argv)
    shared: Line = {"commit": commit()}
    if arguments.setting:
        shared["settings"] = arguments.setting
    if arguments.quick:
        shared["quick"] = True
    report = Report(shared)
    benchmark = Benchmark(arguments, report)
    benchmark.run()
    print(report.table(), file=sys.stderr, flush=True)
    return min(benchmark.failures, 1)


if __name__ == "__main__":
    sys.exit(main())
