"""By which kernel a linear is computed, and how that is cut: static, by rows, outputs and depth.

What took the least time at the shapes of Llama 3.2 1B and 3.1 8B in bf16, with what comes before
and after: a norm of its own (before a skinny product and cuBLAS) takes 1.4 to 2.2 us, SwiGLU of its
own (after cuBLAS) 1.5 to 2.4. The folder's README has the times; `--cuts` of
`tests/bench/gpu_kernels/dense.py` takes them.
"""

from __future__ import annotations

from functools import lru_cache

from pagewire_kernels.gpu.dense_gemv import GemvConfig
from pagewire_kernels.gpu.dense_skinny import SkinnyConfig

# One row: depth up to, cut.
_GEMV = (
    (2048, GemvConfig(4, 1024, 4)),
    (8192, GemvConfig(2, 1024, 2)),
)
_DEEP_GEMV = GemvConfig(2, 2048, 4)

# More rows, of a weight of few outputs: rows up to, outputs up to, cut. 9 to 16 rows leave room for
# one program a multiprocessor: 6144 outputs take three rounds of them, and cuBLAS is faster.
_NARROW = (
    (8, 8191, SkinnyConfig(16, 128, 4, 5, slices=4)),
    (16, 4096, SkinnyConfig(16, 128, 4, 4, slices=4)),
)
# Of a weight of many outputs, which make a program for each multiprocessor: rows up to, cut.
_MANY_OUTPUTS = 8192
_WIDE = (
    (32, SkinnyConfig(64, 128, 4, 4)),
    (64, SkinnyConfig(128, 64, 4, 5)),
)


@lru_cache(1024)  # asked for each linear of a step
def choose_cut(rows: int, outputs: int, depth: int) -> GemvConfig | SkinnyConfig | None:
    """How a product of [rows, depth] and [outputs, depth] is cut; None: cuBLAS is faster."""
    if rows == 1:
        return next((cut for most, cut in _GEMV if depth <= most), _DEEP_GEMV)
    if outputs >= _MANY_OUTPUTS:
        return next((cut for most, cut in _WIDE if 1 < rows <= most), None)
    return next(
        (cut for most, widest, cut in _NARROW if 1 < rows <= most and outputs <= widest), None
    )
