"""Lets the system read ahead what a start on a GPU is about to map.

The libraries of CUDA and the compiler of Triton are gigabytes, of which a start touches a part here
and a part there. On a machine that has not read them before each part is a wait for the disk; read
from end to end they are there when they are needed. Imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

# In the order in which a start needs them; below the folder that torch is installed in.
_FILES = (
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libtorch_cuda.so",
    "torch/lib/libtorch_python.so",
    "nvidia/*/lib/libcublas.so*",
    "nvidia/*/lib/libcublasLt.so*",
    "triton/_C/libtriton.so",
    "triton/backends/nvidia/bin/ptxas",
)
_DRIVER = Path("/dev/nvidiactl")


def read_ahead(device: str) -> None:
    """Begins to read them, where that device may be a GPU of CUDA; returns at once."""
    if device != "cpu" and _DRIVER.exists():
        files = list(library_files())
        threading.Thread(target=_read, args=(files,), name="read-ahead", daemon=True).start()


def library_files() -> Iterator[Path]:
    """Those of the files that are installed."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parents[1]
    for pattern in _FILES:
        yield from sorted(folder.glob(pattern))


def _read(files: Iterable[Path]) -> None:
    for file in files:
        try:
            opened = os.open(file, os.O_RDONLY)
        except OSError:
            continue  # who needs it says so
        try:
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(opened)
