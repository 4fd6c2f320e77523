"""Times the GPU's linears, alone and as a step's chain, beside cuBLAS and the memory's floor.

Usage: python tests/bench/gpu_kernels/dense.py [--models 1B 8B] [--out FILE]

One line of JSON for each measurement, in CUDA graphs, bf16; with --out they go to the file, and the
best three cuts of each linear to standard output. `linear` is one of a layer's, the head,
or `chain`: all linears of a step in order with norms and activations, attention left out. Every
layer has weights of its own, more than the second-level cache holds. `us` is the best of some
replays, by launch; `floor_us` the weights' (for `rows` kernels all) bytes over 2.98 TB/s. `what`
names the kernel and its cut: for gemv outputs x block and warps; for skinny outputs x block, warps,
stages, then slices, splits, prefetched lines and the least tile where they are not 1, 1, 0 and 16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pagewire_kernels.dense import DenseBackend, TorchDense
from pagewire_kernels.gpu.dense import TritonDense
from pagewire_kernels.gpu.dense_gemv import GemvConfig, gemv
from pagewire_kernels.gpu.dense_rows import rms_norm, silu_and_mul
from pagewire_kernels.gpu.dense_skinny import SkinnyConfig, num_programs, skinny
from pagewire_kernels.gpu.launch import compiled_only

_BANDWIDTH = 2.98e12
_EPS = 1e-5
_REPLAYS = 7
_LAUNCHES = 8
_TOLD = 3
_CHAIN_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)

_GEMV = (
    GemvConfig(2, 1024, 2),
    GemvConfig(2, 2048, 4),
    GemvConfig(1, 2048, 4),
    GemvConfig(4, 1024, 4),
)
_NARROW = (  # for matrices of few rows, at most 16 hidden states
    SkinnyConfig(16, 128, 4, 4, slices=4),
    SkinnyConfig(16, 128, 4, 5, slices=4, tile=8),
    SkinnyConfig(16, 64, 4, 6, slices=4),
    SkinnyConfig(16, 256, 2, 5),
    SkinnyConfig(32, 128, 4, 4, slices=4),
    SkinnyConfig(32, 128, 4, 7),
    SkinnyConfig(32, 128, 4, 6, prefetch=8),
    SkinnyConfig(32, 128, 4, 6, splits=4),
    SkinnyConfig(64, 128, 4, 6, splits=4),
)
_WIDE = (  # for the others
    SkinnyConfig(64, 128, 4, 7),
    SkinnyConfig(64, 128, 4, 7, prefetch=8),
    SkinnyConfig(64, 128, 4, 7, tile=8),
    SkinnyConfig(64, 128, 4, 4),
    SkinnyConfig(64, 64, 4, 7),
    SkinnyConfig(32, 128, 4, 5),
)
_MORE_ROWS = (  # for 17 to 64 hidden states
    SkinnyConfig(64, 128, 4, 4),
    SkinnyConfig(64, 64, 4, 6),
    SkinnyConfig(32, 128, 4, 4),
    SkinnyConfig(128, 64, 4, 5),
)


@dataclass(frozen=True)
class Linear:
    """One of a model's linears.

    Attributes:
        name: which.
        rows: of the weight.
        depth: its columns.
        before: whether a norm comes before.
        gated: whether SwiGLU's product comes after.
        adds: whether it is added to the residual stream.
    """

    name: str
    rows: int
    depth: int
    before: bool = False
    gated: bool = False
    adds: bool = False

    @property
    def floor(self) -> float:
        """Microseconds to read the weight."""
        return self.rows * self.depth * 2 / _BANDWIDTH * 1e6


def linears(hidden: int, qkv: int, size: int) -> tuple[Linear, ...]:
    """A layer's, and the head."""
    return (
        Linear("qkv", qkv, hidden, before=True),
        Linear("o", hidden, hidden, adds=True),
        Linear("gate_up", 2 * size, hidden, before=True, gated=True),
        Linear("down", hidden, size, adds=True),
        Linear("head", 128256, hidden),
    )


# Llama 3.2 1B and Llama 3.1 8B: layers, and their linears.
_MODELS = {"1B": (16, linears(2048, 3072, 8192)), "8B": (32, linears(4096, 6144, 14336))}


class Bench:
    """One model's weights, and what is timed over them."""

    def __init__(self, model: str, write: Callable[[dict[str, Any]], None]) -> None:
        layers, self._linears = _MODELS[model]
        self._model = model
        self._write = write
        self._weights = {
            linear.name: [
                _normal(linear.rows, linear.depth)
                for _ in range(1 if linear.name == "head" else layers)
            ]
            for linear in self._linears
        }
        self._norms = {linear.depth: _normal(linear.depth) for linear in self._linears}
        self._arrivals = torch.zeros(8192, dtype=torch.int32, device="cuda")

    def run(self) -> None:
        """Compiles everything, then measures everything."""
        cases = [case for linear in self._linears for case in self._cases(linear)]
        with compiled_only():
            for case in cases:
                case.call(self._weights[case.linear.name][0])
        for case in cases:
            self._measure(case)
        self._rows_kernels()
        for rows in _CHAIN_ROWS:
            for what, dense in (
                ("ours", TritonDense(torch.device("cuda"))),
                ("torch", TorchDense()),
            ):
                self._chain(rows, what, dense)
            self._products(rows)

    def _cases(self, linear: Linear) -> Iterator[_Case]:
        """Every kernel and cut that is to be timed on a linear."""
        for config in _GEMV:
            yield self._gemv_case(linear, config)
        narrow = linear.rows < 64 * 256
        for config in _NARROW if narrow else _WIDE:
            yield from self._skinny_cases(linear, 8, config)
        yield from self._skinny_cases(linear, 16, (_NARROW if narrow else _WIDE)[0])
        for rows in (32, 64):
            for config in _MORE_ROWS:
                yield from self._skinny_cases(linear, rows, config)
        for rows in (1, 8, 16, 32, 64, 256):
            hidden = _normal(rows, linear.depth)
            yield _Case(linear, rows, "cublas", lambda weight, x=hidden: F.linear(x, weight))

    def _gemv_case(self, linear: Linear, config: GemvConfig) -> _Case:
        options = self._options(linear, 1)
        hidden = _normal(1, linear.depth)
        what = f"gemv {config.outputs}x{config.block} w{config.warps}"
        return _Case(linear, 1, what, lambda weight: gemv(hidden, weight, config=config, **options))

    def _skinny_cases(self, linear: Linear, rows: int, config: SkinnyConfig) -> Iterator[_Case]:
        """With the norm folded in, and with a launch of its own."""
        if config.splits > 1 and (linear.gated or num_programs(linear.rows, config) > 8192):
            return
        hidden = _normal(rows, linear.depth)
        options = self._options(linear, rows) | {"config": config, "arrivals": self._arrivals}
        what = _skinny_name(config)
        if not linear.before:
            yield _Case(linear, rows, what, lambda weight: skinny(hidden, weight, **options))
            return
        if config.splits == 1:
            name = f"{what} folded norm"
            yield _Case(linear, rows, name, lambda weight: skinny(hidden, weight, **options))
        apart = {k: v for k, v in options.items() if k not in ("norm_weight", "eps")}
        scale = options["norm_weight"]
        yield _Case(
            linear,
            rows,
            f"{what} norm apart",
            lambda weight: skinny(rms_norm(hidden, scale, _EPS), weight, **apart),
        )

    def _options(self, linear: Linear, rows: int) -> dict[str, Any]:
        options: dict[str, Any] = {"gated": linear.gated}
        if linear.before:
            options |= {"norm_weight": self._norms[linear.depth], "eps": _EPS}
        if linear.adds:
            options["residual"] = _normal(rows, linear.rows) * 0
        return options

    def _measure(self, case: _Case) -> None:
        line = {"linear": case.linear.name, "rows": case.rows, "what": case.what}
        weights = self._weights[case.linear.name]
        try:
            case.call(weights[0])
        except Exception as error:  # Triton's, of any kind: too much shared memory, say
            self._write({"model": self._model, **line, "error": f"{error!r:.200}"})
            return

        def all_layers() -> None:
            for weight in weights:
                case.call(weight)

        self._line(line, graph_microseconds(all_layers) / len(weights), case.linear.floor)

    def _rows_kernels(self) -> None:
        """Norm and activation, of rows that a cache holds, and of more."""
        depth, width = self._linears[0].depth, self._linears[2].rows
        scale = self._norms[depth]
        for rows in (16, 64, 256, 8192):
            hidden, gate_up = _normal(rows, depth), _normal(rows, width)
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "rms_norm": (partial(rms_norm, hidden, scale, _EPS), 2 * hidden.nbytes),
                "silu_and_mul": (partial(silu_and_mul, gate_up), gate_up.nbytes * 3 // 2),
            }
            for what, (call, num_bytes) in calls.items():
                line = {"linear": "rows", "rows": rows, "what": what}
                microseconds = graph_microseconds(partial(_repeat, call)) / _LAUNCHES
                self._line(line, microseconds, num_bytes / _BANDWIDTH * 1e6)

    def _chain(self, rows: int, what: str, dense: DenseBackend) -> None:
        qkv, o, gate_up, down, head = self._linears
        first = _normal(rows, qkv.depth)
        norm = (self._norms[qkv.depth], _EPS)

        def step() -> None:
            residual = first.clone()
            for layer in zip(
                *(self._weights[x.name] for x in (qkv, o, gate_up, down)), strict=True
            ):
                attended = dense.norm_linear(residual, *norm, layer[0])[:, : o.depth]
                residual = dense.linear_add(attended, layer[1], None, residual)
                product = dense.norm_gate_up(residual, *norm, layer[2])
                residual = dense.linear_add(product, layer[3], None, residual)
            dense.logits(dense.rms_norm(residual, *norm), self._weights[head.name][0])

        line = {"linear": "chain", "rows": rows, "what": what}
        self._line(line, graph_microseconds(step), self._step_floor())

    def _products(self, rows: int) -> None:
        """cuBLAS's products of a step, and nothing else."""
        inputs = {linear.name: _normal(rows, linear.depth) for linear in self._linears}

        def step() -> None:
            for linear in self._linears:
                for weight in self._weights[linear.name]:
                    F.linear(inputs[linear.name], weight)

        line = {"linear": "chain", "rows": rows, "what": "cublas alone"}
        self._line(line, graph_microseconds(step), self._step_floor())

    def _step_floor(self) -> float:
        return sum(linear.floor * len(self._weights[linear.name]) for linear in self._linears)

    def _line(self, line: dict[str, Any], microseconds: float, floor: float) -> None:
        self._write(
            {
                "model": self._model,
                **line,
                "us": round(microseconds, 2),
                "floor_us": round(floor, 2),
                "of_floor": round(microseconds / floor, 3),
            }
        )


@dataclass
class _Case:
    linear: Linear
    rows: int
    what: str
    call: Callable[[torch.Tensor], torch.Tensor]


def graph_microseconds(calls: Callable[[], None]) -> float:
    """The best time of some replays of a graph of these calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    graph.replay()
    best = float("inf")
    for _ in range(_REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) * 1e3)
    return best


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_LAUNCHES):
        call()


def _normal(*shape: int) -> torch.Tensor:
    """bf16 numbers whose products with others of their kind neither grow nor vanish."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return tensor.normal_(std=shape[-1] ** -0.5 if len(shape) > 1 and shape[0] > 256 else 1.0)


def _skinny_name(config: SkinnyConfig) -> str:
    name = f"skinny {config.outputs}x{config.block} w{config.warps} s{config.stages}"
    for word, value, usual in (
        ("slices", config.slices, 1),
        ("splits", config.splits, 1),
        ("prefetch", config.prefetch, 0),
        ("tile", config.tile, 16),
    ):
        if value != usual:
            name += f" {word} {value}"
    return name


def summarise(lines: list[dict[str, Any]]) -> None:
    """The best cuts of each linear and number of rows, with cuBLAS's time, a line each."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for line in lines:
        if "error" in line:
            print(
                f"{line['model']} {line['linear']} {line['rows']} {line['what']}: {line['error']}"
            )
        else:
            groups.setdefault((line["model"], line["linear"], line["rows"]), []).append(line)
    for (model, linear, rows), group in groups.items():
        group.sort(key=lambda line: line["us"])
        told = [x for i, x in enumerate(group) if i < _TOLD or x["what"] == "cublas"]
        times = "; ".join(f"{x['us']:.1f} {x['what']}" for x in told)
        print(f"{model} {linear} {rows}, floor {group[0]['floor_us']:.1f}: {times}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--out", type=Path, help="a file for the lines; tells only the best then")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    torch.manual_seed(0)
    card = torch.cuda.get_device_name()
    lines: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> None:
        lines.append({"bench": "dense", "card": card, **line})
        if arguments.out is None:
            print(json.dumps(lines[-1]), flush=True)

    with torch.inference_mode():
        for model in arguments.models:
            Bench(model, write).run()
            torch.cuda.empty_cache()
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        summarise(lines)


if __name__ == "__main__":
    main()
