"""The `cpu` backend: C++ kernels, built by `python -m pagewire_kernels.build`."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagewire_kernels import matrix_registers
from pagewire_kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    BackendUnavailableError,
)
from pagewire_kernels.build import library_path
from pagewire_kernels.dispatch_record import note
from pagewire_kernels.sampling import RowParameters
from pagewire_kernels.token_masks import TokenMasks

# As csrc/vec.h numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_SIGNATURES = {
    "pagewire_paged_attention": (
        [ctypes.c_int32] + [_POINTER] * 7 + [_INT] * 9 + [ctypes.c_float, _INT]
    ),
    "pagewire_write_kv": [ctypes.c_int32] + [_POINTER] * 5 + [_INT] * 5,
    "pagewire_choose": [_POINTER] + [_INT] * 3 + [_POINTER] * 9 + [_INT, _POINTER, _INT],
    "pagewire_packed_depth": [ctypes.c_int32, _INT],
    "pagewire_pack_weight": [ctypes.c_int32] + [_POINTER] * 2 + [_INT] * 4,
    "pagewire_unpack_rows": [ctypes.c_int32] + [_POINTER] * 4 + [_INT] * 2,
    "pagewire_linear": [ctypes.c_int32] + [_POINTER] * 5 + [_INT] * 5 + [ctypes.c_int32, _INT],
    "pagewire_rms_norm": [_POINTER] * 3 + [_INT] * 3 + [ctypes.c_float, _INT],
    "pagewire_rotate": [_POINTER] * 4 + [_INT] * 6,
    "pagewire_silu_and_mul": [_POINTER] * 2 + [_INT] * 4,
    "pagewire_decoder": [_POINTER] * 4,
    "pagewire_lora_add": [_POINTER] * 4 + [_INT] * 4,
    "pagewire_lora_add_embedded": [_POINTER] * 4 + [_INT] * 3,
}
# These return 1 where memory runs out.
_ALLOCATING = (
    "pagewire_paged_attention",
    "pagewire_choose",
    "pagewire_linear",
    "pagewire_decoder",
    "pagewire_lora_add",
    "pagewire_lora_add_embedded",
)


class CpuAttention(AttentionBackend):
    """Paged attention and cache writes in C++; caches in float32, bfloat16 or float16.

    Queries, keys and values come in fp32 from the dense C++ kernels; others are widened first.
    """

    name = "cpu"
    head_dim_multiple = 8

    def __init__(self, library: ctypes.CDLL) -> None:
        self._paged_attention = library.pagewire_paged_attention
        self._write_kv = library.pagewire_write_kv

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        key, value = key.float(), value.float()
        self._write_kv(
            DTYPES[key_cache.dtype],
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slot_mapping.data_ptr(),
            key.shape[0],
            key.stride(0),
            value.stride(0),
            key.shape[1] * key.shape[2],
            torch.get_num_threads(),
        )

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        wide = query.float()
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        _check(wide, key_cache, value_cache, metadata.block_tables)
        output = torch.empty(query.shape)
        note("pagewire_paged_attention")
        self._paged_attention(
            DTYPES[key_cache.dtype],
            wide.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            output.data_ptr(),
            metadata.query_start_locations.data_ptr(),
            metadata.context_lengths.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.context_lengths.shape[0],
            metadata.num_decodes,
            wide.stride(0),
            metadata.block_tables.stride(0),
            block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            sliding_window or 0,
            scale,
            torch.get_num_threads(),
        )
        return output.to(query.dtype)


class CpuChooser:
    """Token choice in C++: one thread a row, noise for hopeful candidates only."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose = library.pagewire_choose

    def choose(
        self, logits: torch.Tensor, parameters: RowParameters, masks: TokenMasks | None = None
    ) -> torch.Tensor:
        if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.device.type != "cpu":
            raise ValueError("the cpu sampling backend reads float32 rows on CPU")
        num_rows, vocab_size = logits.shape
        if any(len(column) != num_rows for column in vars(parameters).values()):
            raise ValueError(f"{num_rows} rows have a value each of every parameter")
        if min(parameters.top_ks) < 1:
            raise ValueError("top_k is at least 1: as many as there are tokens keep all")
        rows_of_bits, bits, num_words = None, None, 0
        if masks is not None:
            bits, num_words = masks.bits.data_ptr(), masks.bits.shape[1]
            if masks.bits.dtype != torch.int32 or not masks.bits.is_contiguous():
                raise ValueError("masks are contiguous int32")
            if num_words * 32 < vocab_size:
                raise ValueError(f"a mask has a bit for each token: {num_words} words are too few")
            if len(masks.rows) != num_rows or max(masks.rows) >= len(masks.bits):
                raise ValueError(f"{num_rows} rows have a mask each, of {len(masks.bits)}, or -1")
            rows_of_bits = _integers(masks.rows)
        chosen = torch.empty(num_rows, dtype=torch.int64)
        # No tensors: to make seven of them takes longer than some choices.
        self._choose(
            logits.data_ptr(),
            num_rows,
            vocab_size,
            logits.stride(0),
            (ctypes.c_float * num_rows)(*parameters.temperatures),
            (ctypes.c_float * num_rows)(*map(_log, parameters.min_ps)),
            _integers(parameters.top_ks),
            (ctypes.c_double * num_rows)(*parameters.top_ps),
            _integers(parameters.seeds),
            _integers(parameters.sequence_indexes),
            _integers(parameters.positions),
            rows_of_bits,
            bits,
            num_words,
            chosen.data_ptr(),
            torch.get_num_threads(),
        )
        return chosen


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def load_chooser() -> CpuChooser:
    """The C++ token chooser.

    Raises:
        BackendUnavailableError: the kernels were not built.
    """
    return CpuChooser(load_library())


def load_backend(device: torch.device) -> CpuAttention:
    """The C++ backend.

    Raises:
        BackendUnavailableError: not a CPU device, or the kernels were not built.
    """
    if device.type != "cpu":
        raise BackendUnavailableError(
            f"attention backend 'cpu' runs on CPU tensors, not on {device}; "
            "use --attention-backend torch, or --device cpu"
        )
    return CpuAttention(load_library())


@functools.cache
def load_library(path: Path | None = None) -> ctypes.CDLL:
    """The built library.

    Args:
        path: default: the one for this machine's processor.

    Raises:
        BackendUnavailableError: it was not built for these sources and this processor.
    """
    matrix_registers.request_permission()  # a library that a caller names may use them
    path = path or library_path()
    if not path.exists():
        raise BackendUnavailableError(
            "the C++ kernels are not built on this machine; run `python -m pagewire_kernels.build` "
            "(it takes some seconds and needs g++ or clang++), or use --attention-backend torch"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailableError(
            f"the C++ kernels can't be loaded ({error}); build them again by "
            "`python -m pagewire_kernels.build --force`, or use --attention-backend torch"
        ) from error
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = signature
        function.restype = None
    for name in _ALLOCATING:
        function = getattr(library, name)
        function.restype = ctypes.c_int32
        function.errcheck = _raise_where_memory_ran_out
    library.pagewire_panel_size.argtypes = []
    library.pagewire_panel_size.restype = _INT
    library.pagewire_packed_depth.restype = _INT
    return library


def _raise_where_memory_ran_out(status: Any, function: Any, arguments: Any) -> None:
    if status:
        raise MemoryError(
            f"there is no memory for what {function.__name__} computes; lower "
            "max_num_batched_tokens or kv_cache_memory"
        )


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """The C++ side trusts its pointers: what it can't read is refused here.

    Raises:
        ValueError: dtype, head size or memory layout that the kernels do not read.
    """
    head_dim = query.shape[2]
    if key_cache.dtype not in _CACHE_DTYPES or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"the cpu attention backend reads caches of float32, bfloat16 or float16, the same for "
            f"keys and values, not {key_cache.dtype} and {value_cache.dtype}"
        )
    if head_dim % CpuAttention.head_dim_multiple:
        raise ValueError(
            f"the cpu attention backend needs a head size divisible by 8, not {head_dim}; "
            "use --attention-backend torch"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("the cpu attention backend reads contiguous caches only")
    if query.stride()[1:] != (head_dim, 1) or block_tables.stride(1) != 1:
        raise ValueError("a token's heads and a sequence's block table must be contiguous")
