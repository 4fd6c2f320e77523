"""Times what a model computes between attentions on the GPU, beside cuBLAS and the memory's floor.

Usage: python tests/bench/gpu_kernels/dense.py [--models 1B 8B] [--cuts] [--out FILE]

In CUDA graphs, bf16. A line for each model and number of rows: `ours` is a step as the model runs
it (norms, linears, SwiGLU, residual, head; attention left out), `cublas alone` the step's products
and nothing else, `floor` the time to read the weights at the rate of a copy on this card.

--cuts instead times each linear with what comes before and after it, by cuBLAS and by several cuts
of the Triton kernels, of which it tells the best: `dense_cuts.py` is made from that. For gemv a cut
is outputs x block and warps; for skinny outputs x block, warps, stages, then slices if not 1.

--out writes all as a line of JSON each. Every layer has weights of its own, more than the
second-level cache holds; times are the best of some replays.
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

from pagewire_kernels.gpu.dense import TritonDense
from pagewire_kernels.gpu.dense_gemv import GemvConfig
from pagewire_kernels.gpu.dense_rows import rms_norm, silu_and_mul
from pagewire_kernels.gpu.dense_skinny import SkinnyConfig
from pagewire_kernels.gpu.launch import compiled_only

_EPS = 1e-5
_REPLAYS = 7
_LAUNCHES = 8
_TOLD = 3
_COPIED_BYTES = 1 << 30
_CHAIN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CUT_ROWS = (1, 8, 16, 32, 64)

_GEMV = (
    GemvConfig(2, 1024, 2),
    GemvConfig(2, 2048, 4),
    GemvConfig(1, 2048, 4),
    GemvConfig(4, 1024, 4),
)
_NARROW = (  # for matrices of few outputs
    SkinnyConfig(16, 128, 4, 4, slices=4),
    SkinnyConfig(16, 128, 4, 5, slices=4),
    SkinnyConfig(16, 64, 4, 6, slices=4),
    SkinnyConfig(32, 128, 4, 4, slices=4),
    SkinnyConfig(64, 128, 4, 4),
)
_WIDE = (  # for the others
    SkinnyConfig(64, 128, 4, 4),
    SkinnyConfig(64, 128, 4, 7),
    SkinnyConfig(64, 64, 4, 6),
    SkinnyConfig(128, 64, 4, 5),
)


@dataclass(frozen=True)
class Linear:
    """One of a model's linears.

    Attributes:
        name: which.
        outputs: rows of the weight.
        depth: its columns.
        before: whether a norm comes before.
        gated: whether SwiGLU's product comes after.
        adds: whether it is added to the residual stream.
    """

    name: str
    outputs: int
    depth: int
    before: bool = False
    gated: bool = False
    adds: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return self.outputs * self.depth * 2


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

Cut = GemvConfig | SkinnyConfig | None


class FixedCut(TritonDense):
    """Every linear is cut in one way; None: by cuBLAS."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def cut_for(self, hidden: torch.Tensor, weight: Any) -> Cut:
        return self._cut


@dataclass(frozen=True)
class Case:
    """A linear with what surrounds it, to be called with a weight."""

    linear: Linear
    rows: int
    what: str
    call: Callable[[torch.Tensor], torch.Tensor]


class Bench:
    """One model's weights, and what is timed over them."""

    def __init__(
        self, model: str, bytes_per_microsecond: float, write: Callable[[dict[str, Any]], None]
    ) -> None:
        layers, self._linears = _MODELS[model]
        self._model = model
        self._rate = bytes_per_microsecond
        self._write = write
        self._weights = {
            linear.name: [
                _normal(linear.outputs, linear.depth)
                for _ in range(1 if linear.name == "head" else layers)
            ]
            for linear in self._linears
        }
        self._norm = (_normal(self._linears[0].depth), _EPS)

    def chains(self) -> None:
        """Compiles, then times a step of each number of rows."""
        dense = TritonDense()
        with compiled_only():
            for rows in _CHAIN_ROWS:
                self._step(dense, _normal(rows, self._linears[0].depth))
        num_bytes = sum(x.num_bytes * len(self._weights[x.name]) for x in self._linears)
        for rows in _CHAIN_ROWS:
            first = _normal(rows, self._linears[0].depth)
            ours = graph_microseconds(partial(self._step, dense, first))
            inputs = {x.name: _normal(rows, x.depth) for x in self._linears}
            cublas = graph_microseconds(partial(self._products, inputs))
            for what, microseconds in (("ours", ours), ("cublas alone", cublas)):
                self._line("chain", rows, what, microseconds, num_bytes)
            print(
                f"{self._model} {rows:3} rows: ours {ours / 1e3:.3f} ms, "
                f"cublas alone {cublas / 1e3:.3f}, floor {num_bytes / self._rate / 1e3:.3f}; "
                f"ours over cublas {ours / cublas:.3f}",
                flush=True,
            )

    def cuts(self) -> None:
        """Compiles, then times every linear by every kernel and cut."""
        cases = [case for linear in self._linears for case in self._cases(linear)]
        with compiled_only():
            for case in cases:
                case.call(self._weights[case.linear.name][0])
        for case in cases:
            self._measure(case)
        self._rows_kernels()

    def _step(self, dense: TritonDense, first: torch.Tensor) -> None:
        qkv, o, gate_up, down, head = (self._weights[linear.name] for linear in self._linears)
        residual = first.clone()
        for layer in zip(qkv, o, gate_up, down, strict=True):
            attended = dense.norm_linear(residual, *self._norm, layer[0])[:, : first.shape[1]]
            residual = dense.linear_add(attended, layer[1], None, residual)
            product = dense.norm_gate_up(residual, *self._norm, layer[2])
            residual = dense.linear_add(product, layer[3], None, residual)
        dense.logits(dense.rms_norm(residual, *self._norm), head[0])

    def _products(self, inputs: dict[str, torch.Tensor]) -> None:
        for name, weights in self._weights.items():
            for weight in weights:
                F.linear(inputs[name], weight)

    def _cases(self, linear: Linear) -> Iterator[Case]:
        skinny = _NARROW if linear.outputs < 8192 else _WIDE
        for rows in _CUT_ROWS:
            for cut in (None, *(_GEMV if rows == 1 else skinny)):
                yield Case(linear, rows, _name(cut), self._operation(linear, rows, FixedCut(cut)))

    def _operation(
        self, linear: Linear, rows: int, dense: TritonDense
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        hidden = _normal(rows, linear.depth)
        if linear.gated:
            return lambda weight: dense.norm_gate_up(hidden, *self._norm, weight)
        if linear.before:
            return lambda weight: dense.norm_linear(hidden, *self._norm, weight)
        if linear.adds:
            residual = torch.zeros_like(_normal(rows, linear.outputs))
            return lambda weight: dense.linear_add(hidden, weight, None, residual)
        return lambda weight: dense.logits(hidden, weight)

    def _measure(self, case: Case) -> None:
        weights = self._weights[case.linear.name]
        try:
            case.call(weights[0])
        except Exception as error:  # Triton's, of any kind: too much shared memory, say
            line = {"linear": case.linear.name, "rows": case.rows, "what": case.what}
            self._write({"model": self._model, **line, "error": f"{error!r:.200}"})
            return

        def all_layers() -> None:
            for weight in weights:
                case.call(weight)

        microseconds = graph_microseconds(all_layers) / len(weights)
        self._line(case.linear.name, case.rows, case.what, microseconds, case.linear.num_bytes)

    def _rows_kernels(self) -> None:
        """Norm and activation, of rows that a cache holds, and of more."""
        depth, width = self._linears[0].depth, self._linears[2].outputs
        for rows in (16, 64, 256, 8192):
            hidden, gate_up = _normal(rows, depth), _normal(rows, width)
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "rms_norm": (partial(rms_norm, hidden, *self._norm), 2 * hidden.nbytes),
                "silu_and_mul": (partial(silu_and_mul, gate_up), gate_up.nbytes * 3 // 2),
            }
            for what, (call, num_bytes) in calls.items():
                microseconds = graph_microseconds(partial(_repeat, call)) / _LAUNCHES
                self._line("rows", rows, what, microseconds, num_bytes)

    def _line(self, linear: str, rows: int, what: str, microseconds: float, num_bytes: int) -> None:
        floor = num_bytes / self._rate
        line = {"model": self._model, "linear": linear, "rows": rows, "what": what}
        times = {"us": round(microseconds, 2), "floor_us": round(floor, 2)}
        self._write({**line, **times, "of_floor": round(microseconds / floor, 3)})


def graph_microseconds(calls: Callable[[], object]) -> float:
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


def copied_bytes_per_microsecond() -> float:
    """What a copy on this card reads and writes."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / graph_microseconds(partial(target.copy_, source))


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_LAUNCHES):
        call()


def _normal(*shape: int) -> torch.Tensor:
    """bf16 numbers whose products with others of their kind neither grow nor vanish."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return tensor.normal_(std=shape[-1] ** -0.5 if len(shape) > 1 and shape[0] > 256 else 1.0)


def _name(cut: Cut) -> str:
    if cut is None:
        return "cublas"
    name = f"{cut.outputs}x{cut.block} w{cut.warps}"
    if isinstance(cut, GemvConfig):
        return f"gemv {name}"
    return f"skinny {name} s{cut.stages}" + (f" slices {cut.slices}" if cut.slices > 1 else "")


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
    parser.add_argument(
        "--cuts",
        action="store_true",
        help="time each linear by several cuts of the kernels, instead of whole steps",
    )
    parser.add_argument("--out", type=Path, help="a file for all times, a line of JSON each")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    torch.manual_seed(0)
    card = torch.cuda.get_device_name()
    lines: list[dict[str, Any]] = []
    with torch.inference_mode():
        rate = copied_bytes_per_microsecond()
        print(f"{card}: a copy reads and writes {rate / 1e6:.2f} TB/s", flush=True)
        for model in arguments.models:
            bench = Bench(model, rate, lines.append)
            if arguments.cuts:
                bench.cuts()
            else:
                bench.chains()
            del bench
            torch.cuda.empty_cache()
    if arguments.cuts:
        summarise(lines)
    if arguments.out is not None:
        common = {"bench": "dense", "card": card}
        text = "".join(json.dumps({**common, **line}) + "\n" for line in lines)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
