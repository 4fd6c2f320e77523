"""What the results of the GPU benchmark are called, and what they are set against."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ge, le

from tests.bench.gpu.lines import ROOT, Line

# Every line has these, in this order, null where a test has nothing to say.
_KEYS = (
    "engine", "model", "test", "batch", "out_tok_s", "ms_per_step", "prefill_tok_s", "startup_s",
    "card", "commit",
)  # fmt: skip
# Copy ceilings, for floors where a run has not measured its card's.
_COPY_TB_S = {"NVIDIA H100 80GB HBM3": 2.983, "NVIDIA H200": 4.244}


@dataclass(frozen=True)
class Target:
    """A figure that must be reached, one that is aimed at, and the peer's (vLLM 0.26.0)."""

    model: str
    test: str
    batch: int | None
    key: str
    peer: float | None
    must: float
    aim: float
    better: Callable[[float, float], bool]


TARGETS = [
    Target("8b", "A", None, "out_tok_s", 8_561, 8_600, 10_000, ge),
    Target("8b", "B", 1, "ms_per_step", 6.493, 5.9, 5.3, le),
    Target("8b", "B", 8, "ms_per_step", 6.636, 6.2, 5.6, le),
    Target("8b", "B", 64, "ms_per_step", 7.782, 7.3, 6.5, le),
    Target("8b", "C", 16, "prefill_tok_s", 42_648, 43_000, 48_000, ge),
    Target("8b", "start", None, "startup_s", 80.6, 25, 15, le),
    Target("8b", "F", None, "of_greedy", 0.985, 0.97, 0.99, ge),
    Target("8b", "server", 64, "of_offline", None, 0.93, 1.0, ge),
    Target("8b", "server", 256, "of_offline", None, 0.93, 1.0, ge),
    Target("8b", "submits", None, "p99_ratio", None, 1.2, 1.0, le),
    Target("1b", "A", None, "out_tok_s", 18_311, 28_000, 40_000, ge),
    Target("1b", "B", 1, "ms_per_step", 2.235, 1.2, 0.95, le),
    Target("1b", "B", 8, "ms_per_step", 1.919, 1.3, 1.05, le),
    Target("1b", "B", 64, "ms_per_step", 2.958, 1.8, 1.4, le),
    Target("1b", "F", None, "of_greedy", 0.785, 0.97, 0.99, ge),
    Target("1b", "submits", None, "p99_ratio", None, 1.2, 1.0, le),
]


class Report:
    """Gathers the lines of a run, and completes each from those before it."""

    def __init__(self, shared: Line) -> None:
        """`shared` goes into every line: the commit, the settings."""
        self._shared = shared
        self.lines: list[Line] = []

    def add(self, model: str | None, line: Line) -> Line:
        """The line as it is printed and kept."""
        known = dict.fromkeys(_KEYS) | {"engine": "pagewire", "model": model}
        complete = known | self._shared | line
        # What the processes behind a server don't tell is known from those before them.
        complete["card"] = line.get("card") or self._card()
        complete |= self._ratios(complete)
        self.lines.append(complete)
        return complete

    def find(self, model: str | None, test: str, batch: int | None = None) -> Line | None:
        """The last such line that is no error; `batch` None: of any batch."""
        for line in reversed(self.lines):
            known = (line["model"], line["test"]) == (model, test) and "error" not in line
            if known and batch in (None, line["batch"]):
                return line
        return None

    def _card(self) -> str | None:
        return next((line["card"] for line in reversed(self.lines) if line["card"]), None)

    def _ratios(self, line: Line) -> Line:
        if line["test"] == "B" and "min_GB_per_step" in line:
            copy = self.find(None, "copy")
            rate = copy["TB_s"] if copy else _COPY_TB_S.get(line["card"])
            if rate is None:
                return {}
            floor_ms = line["min_GB_per_step"] / rate
            over = line["ms_per_step"] / max(floor_ms, 1e-9)
            return {"floor_ms": round(floor_ms, 3), "over_floor": round(over, 3)}
        if line["test"] == "F":
            return self._over(line, self.find(line["model"], "A"), "of_greedy")
        if line["test"] == "server":
            # A by one call keeps the engine full, as do as many clients as it takes sequences.
            alone = self.find(line["model"], f"A{line['batch']}") or self.find(line["model"], "A")
            return self._over(line, alone, "of_offline")
        return {}

    def _over(self, line: Line, base: Line | None, key: str) -> Line:
        if base is None or not line["out_tok_s"]:
            return {}
        return {key: round(line["out_tok_s"] / base["out_tok_s"], 3)}

    def table(self) -> str:
        """Targets that this run has figures for, and what it reached."""
        rows = [("model test", "got", "must", "aim", "vLLM", "")]
        for target in TARGETS:
            line = self.find(target.model, target.test, target.batch)
            got = line and line.get(target.key)
            if got is None:
                continue
            name = f"{target.model} {target.test}"
            name += f" {target.batch}" if target.batch is not None else ""
            verdict = "aim" if target.better(got, target.aim) else "ok"
            verdict = verdict if target.better(got, target.must) else "MISSED"
            figures = [got, target.must, target.aim, target.peer]
            rows.append((f"{name} {target.key}", *map(_shown, figures), verdict))
        return _aligned(rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    )


def commit() -> str | None:
    """The commit that is measured, where git or PAGEWIRE_COMMIT tells it."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        told = ""
    return told or os.environ.get("PAGEWIRE_COMMIT")
