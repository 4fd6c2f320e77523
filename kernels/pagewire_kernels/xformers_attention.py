"""The `xformers` backend: prompts by xFormers' operators, decodes by the Triton kernels.

xFormers' own paged operators need pages of 64 or more keys and a compilation for each shape of a
batch, so that keys and values of prompts are gathered from their blocks instead.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagewire_kernels.attention import AttentionMetadata, BackendUnavailableError
from pagewire_kernels.dispatch_record import note
from pagewire_kernels.gpu.attention import TritonAttention
from pagewire_kernels.gpu.attention import load_backend as load_triton
from pagewire_kernels.torch_attention import gather

# Which of them can do a batch (its dtype, head size, mask; this device) they say themselves.
_OPERATORS = ("flash3", "flash", "cutlass")
_REMEDY = (
    "run `pip install 'pagewire[xformers]'`, which brings it and the CUDA runtime its wheels are "
    "built for, or use --attention-backend triton"
)


@dataclass(frozen=True)
class ChunkBatch:
    """The sequences after the decodes, as xFormers takes them.

    Attributes:
        rows: their rows of the step's batch.
        slots: int64 [L], where the keys of all of them lie in the cache, one context after another.
        mask: a block-diagonal causal mask of len(rows) x L.
    """

    rows: slice
    slots: torch.Tensor
    mask: Any


class XformersAttention(TritonAttention):
    """memory_efficient_attention_forward for chunks; all else as the triton backend does it."""

    name = "xformers"
    head_dim_multiple = 8
    captures_chunks = False

    def __init__(self, fmha: Any, dependent_launch: bool) -> None:
        """
        Args:
            fmha: the module xformers.ops.fmha.
            dependent_launch: see TritonAttention.
        """
        super().__init__(dependent_launch)
        self._fmha = fmha

    def attend_chunks(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        output: torch.Tensor,
    ) -> None:
        """Gathers the contexts' keys and values and runs the first operator that can.

        Raises:
            ValueError: none can; the message says why.
        """
        batch = self._chunk_batch(metadata, key_cache.shape[1], window)
        if batch is None:
            return
        num_kv_heads, head_dim = key_cache.shape[2:]
        shape = (1, -1, num_kv_heads, query.shape[1] // num_kv_heads, head_dim)
        grouped = query[batch.rows].view(shape)
        # Heads that share keys read them through a stride of 0.
        key, value = (
            gather(cache.flatten(0, 1), batch.slots).to(query.dtype)[None, :, :, None].expand(shape)
            for cache in (key_cache, value_cache)
        )
        operator = self._operator(grouped, key, value, batch.mask, scale)
        note(f"xformers.{operator.NAME}")
        attended = self._fmha.memory_efficient_attention_forward(
            grouped, key, value, attn_bias=batch.mask, scale=scale, op=operator
        )
        output[batch.rows] = attended[0].flatten(1, 2)

    def _operator(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float
    ) -> Any:
        inputs = self._fmha.Inputs(query, key, value, attn_bias=mask, scale=scale)
        reasons = []
        for name in _OPERATORS:
            operator = getattr(self._fmha, name).FwOp
            why_not = operator.not_supported_reasons(inputs)
            if not why_not:
                return operator
            reasons.append(f"{operator.NAME}: {', '.join(why_not)}")
        raise ValueError(
            f"no operator of xformers takes heads of {query.shape[-1]} in {query.dtype} here "
            f"({'; '.join(reasons)}); use --attention-backend triton"
        )

    def _chunk_batch(
        self, metadata: AttentionMetadata, block_size: int, window: int
    ) -> ChunkBatch | None:
        """The same for every layer with this window; None: no sequence has rows."""
        key = ("xformers", block_size, window)
        if key not in metadata.derived:
            metadata.derived[key] = self._new_chunk_batch(metadata, block_size, window)
        batch: ChunkBatch | None = metadata.derived[key]
        return batch

    def _new_chunk_batch(
        self, metadata: AttentionMetadata, block_size: int, window: int
    ) -> ChunkBatch | None:
        starts = metadata.host_query_start_locations
        sequences = [
            sequence
            for sequence in range(metadata.num_decodes, len(starts) - 1)
            if starts[sequence + 1] > starts[sequence]
        ]
        if not sequences:
            return None
        lengths = [starts[sequence + 1] - starts[sequence] for sequence in sequences]
        contexts = [metadata.host_context_lengths[sequence] for sequence in sequences]
        owners = np.repeat(sequences, contexts)
        positions = np.concatenate([np.arange(context) for context in contexts])
        device = metadata.block_tables.device
        places = torch.from_numpy(np.stack((owners, positions // block_size))).to(device)
        offsets = torch.from_numpy(positions % block_size).to(device)
        blocks = metadata.block_tables[places[0], places[1]].long()
        mask = self._fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
            lengths, contexts, device=device
        )
        if window:
            mask = mask.make_local_attention_from_bottomright(window)
        rows = slice(starts[sequences[0]], starts[sequences[-1] + 1])
        return ChunkBatch(rows, blocks * block_size + offsets, mask)


def load_backend(device: torch.device) -> XformersAttention:
    """The xFormers backend.

    Raises:
        BackendUnavailableError: not a CUDA device, not installed, or without its CUDA library.
    """
    try:
        backend = load_triton(device)
    except BackendUnavailableError as error:
        raise BackendUnavailableError(str(error).replace("'triton'", "'xformers'")) from error
    _load_cuda_runtime()
    try:
        fmha = importlib.import_module("xformers.ops.fmha")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "xformers":
            raise
        raise BackendUnavailableError(
            f"attention backend 'xformers' is not installed; {_REMEDY}"
        ) from error
    library = importlib.import_module("xformers._cpp_lib")
    if not library._built_with_cuda:
        reason = " ".join(str(library._cpp_library_load_exception).split())
        raise BackendUnavailableError(
            f"attention backend 'xformers' can't load its CUDA library ({reason}); {_REMEDY}"
        )
    return XformersAttention(fmha, backend.dependent_launch)


def _load_cuda_runtime() -> None:
    """Makes the CUDA 12 runtime known that the wheels of xFormers want, beside a newer torch's."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_runtime")
    except ModuleNotFoundError:
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob("lib/libcudart.so.12"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
