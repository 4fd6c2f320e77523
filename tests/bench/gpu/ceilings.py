"""What the device does at best: a copy of its memory, and a matrix product in bf16.

Usage: python -m tests.bench.gpu.ceilings cuda|cpu
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

from tests.bench.gpu.lines import Line, answers

# Bytes copied and rows of the square matrices, by device: a CPU only shows that this works.
_SIZES = {"cuda": (4 << 30, 8192), "cpu": (4 << 20, 128)}
_WARM_UP, _REPEATS = 3, 15


def copy_ceiling(device: torch.device, num_bytes: int) -> Line:
    """Bytes read and written in a second."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source), device)
    return {"test": "copy", "TB_s": round(2 * num_bytes / seconds / 1e12, 3)}


def matmul_ceiling(device: torch.device, rows: int) -> Line:
    """Floating point operations in a second, on random data: zeros would draw less power."""
    left, right = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    seconds = _median_seconds(lambda: torch.mm(left, right, out=product), device)
    return {"test": "matmul", "TFLOP_s": round(2 * rows**3 / seconds / 1e12, 1)}


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return statistics.median([once() for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:])


def results(device_type: str) -> Iterator[Line]:
    """All ceilings of the device."""
    device = torch.device(device_type)
    num_bytes, rows = _SIZES[device_type]
    yield copy_ceiling(device, num_bytes)
    yield matmul_ceiling(device, rows)


def main() -> None:
    tell = answers()
    for line in results(sys.argv[1]):
        tell(line)


if __name__ == "__main__":
    main()
